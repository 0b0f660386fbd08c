"""System messages within a conversation, for chat templates that take them at the beginning alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_SPEAKERS = ("system", "developer", "user", "assistant", "tool")


def is_late(messages: Sequence[Message]) -> bool:
    """True if the system speaks after the conversation has begun: a template's own roles may come before."""
    begun = next((i for i, message in enumerate(messages) if message["role"] in _SPEAKERS), len(messages))
    return any(message["role"] == "system" for message in messages[begun + 1 :])


def probe(text: str) -> list[dict[str, Any]]:
    """A conversation in which the system says this in between."""
    return [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": text},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Hi"},
    ]


def folded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same conversation in which the system speaks at the beginning alone.

    What it says later becomes part of the message before it, a user's or a tool's, between marks; behind an
    assistant's, of the user's message that follows, or a message of its own. So roles take turns as before.
    """
    found: list[dict[str, Any]] = []
    opened = None  # where a user's message stands that has nothing yet but what the system says
    for message in map(dict, messages):
        role, content = message["role"], message.get("content")
        if role == "system" and found:
            if found[-1]["role"] == "assistant":
                opened = len(found)
                found.append({"role": "user", "content": ""})
            said = content if found[-1]["role"] == "system" else _marked(content)
            found[-1]["content"] = joined(found[-1]["content"], said)
        elif role == "user" and opened == len(found) - 1:
            found[-1] = {**message, "content": joined(found[-1]["content"], content)}
            opened = None
        else:
            found.append(message)
    return found


def _marked(content: Any) -> Any:
    """Content of text, or of parts, as said by the system."""
    return joined(joined("<system>", content, "\n"), "</system>", "\n")


def joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents in one: parts if one of them is."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first else second
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second)]
    return [part for content in parts for part in content]
