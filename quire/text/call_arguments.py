"""Arguments of tool calls as JSON text, for chat templates that fail at an object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def is_calling(messages: Sequence[Message]) -> bool:
    """Return True if the conversation has tool calls."""
    return any(message.get("tool_calls") for message in messages)


def probe_object(text: str) -> list[dict[str, Any]]:
    """Return a conversation with a tool call whose arguments are an object that holds `text`."""
    return _probe({text: text})


def probe_text(text: str) -> list[dict[str, Any]]:
    """Return the same conversation with the arguments as JSON text."""
    return _probe(json.dumps({text: text}))


def _probe(arguments: str | dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Hello", "name": "probe", "tool_call_id": "probe0000"},
    ]


def as_text(messages: Sequence[Message], stated: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with arguments as text: the very text of `stated` where that has text."""
    found = [dict(message) for message in messages]
    for message, original in zip(found, stated, strict=True):
        if message.get("tool_calls"):
            pairs = zip(message["tool_calls"], original["tool_calls"], strict=True)
            message["tool_calls"] = [_with_text(call, own) for call, own in pairs]
    return found


def _with_text(call: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"], stated["function"])}
    own = stated.get("arguments") or {}
    return {**call, "arguments": own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)}
