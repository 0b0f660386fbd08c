"""Forms of an assistant's messages with calls, for chat templates that fail at a common one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.call_arguments import probe_object, probe_text

Message = Mapping[str, Any]
Conversation = list[dict[str, Any]]

# Contents without text, in the order in which they are tried.
_EMPTY: tuple[Any, ...] = ("", None, [{"type": "text", "text": ""}])
_READS_THINKING = re.compile(r"""\.thinking\b|\[["']thinking["']\]""")


def is_silent(messages: Sequence[Message]) -> bool:
    """Return True if a message has calls and no text."""
    return any(message.get("tool_calls") and not message.get("content") for message in messages)


def probes_of_silence(text: str) -> list[tuple[Any, list[Conversation]]]:
    """Return the forms of a content without text, each with conversations that hold it."""
    return [(form, [_with(make(text), form) for make in (probe_object, probe_text)]) for form in _EMPTY]


def _with(conversation: Conversation, content: Any) -> Conversation:
    return [turn | {"content": content} if "tool_calls" in turn else turn for turn in conversation]


def silenced(messages: Sequence[Message], form: Any) -> Conversation:
    """Return the messages with this content in those that have calls and no text."""
    return [
        {**message, "content": form}
        if message.get("tool_calls") and not message.get("content")
        else dict(message)
        for message in messages
    ]


def reads_thinking(source: str) -> bool:
    """Return True if a template reads the reasoning of earlier turns from the field `thinking`."""
    return _READS_THINKING.search(source) is not None


def probe_both(text: str) -> Conversation:
    """Return a conversation with a call, and this text twice: as what was thought and said before it."""
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {}}}
    answer = {"role": "assistant", "content": text, "thinking": text, "tool_calls": [call]}
    return [{"role": "user", "content": "Hi"}, answer]


def with_thinking(messages: Sequence[Message], together: bool) -> Conversation:
    """Return the messages with their reasoning in the field `thinking`, too.

    With `together`, it holds what was said before a call as well: the template does not take both.
    """
    found = []
    for message in map(dict, messages):
        thoughts, content = message.get("reasoning_content"), message.get("content")
        if isinstance(thoughts, str) and thoughts and "thinking" not in message:
            message["thinking"] = thoughts
            if together and message.get("tool_calls") and isinstance(content, str) and content:
                message |= {"thinking": f"{thoughts}\n\n{content}", "content": ""}
        found.append(message)
    return found
