"""System messages, for chat templates that take them only at the beginning, or know no developer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
DEVELOPER = "developer"  # OpenAI's newer name of the role
_SPEAKERS = ("system", DEVELOPER, "user", "assistant", "tool")


def of_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation with the developer's messages as the system's."""
    return [{**one, "role": "system"} if one["role"] == DEVELOPER else dict(one) for one in messages]


def is_late(messages: Sequence[Message]) -> bool:
    """Return True if a system message follows one of a common role. Roles of a template's own may precede."""
    begun = next((i for i, message in enumerate(messages) if message["role"] in _SPEAKERS), len(messages))
    return any(message["role"] == "system" for message in messages[begun + 1 :])


def probe(text: str) -> list[dict[str, Any]]:
    """Return a conversation with a system message of this text in the middle."""
    return [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": text},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Hi"},
    ]


def folded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation with system messages at its beginning alone.

    The text of a later one is put between marks into the message before it, a user's or a tool's. After an
    assistant's message it goes into the user's message that follows, or becomes one, so that roles alternate
    as before.
    """
    found: list[dict[str, Any]] = []
    opened = None  # index of a user message that holds nothing but a system message so far
    for message in map(dict, messages):
        role, content = message["role"], message.get("content")
        if role == "system" and found:
            if found[-1]["role"] == "assistant":
                opened = len(found)
                found.append({"role": "user", "content": ""})
            text = content if found[-1]["role"] == "system" else _marked(content)
            found[-1]["content"] = joined(found[-1]["content"], text)
        elif role == "user" and opened == len(found) - 1:
            found[-1] = {**message, "content": joined(found[-1]["content"], content)}
            opened = None
        else:
            found.append(message)
    return found


def _marked(content: Any) -> Any:
    """Mark content, text or parts, as the system's."""
    return joined(joined("<system>", content, "\n"), "</system>", "\n")


def joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Join two contents: as parts if one of them is a list of parts, as text otherwise."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first else second
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second)]
    return [part for content in parts for part in content]
