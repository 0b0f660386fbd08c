"""Consecutive user messages, for chat templates in which users and assistants must alternate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire.text.late_system import joined

Message = Mapping[str, Any]


def repeats(messages: Sequence[Message]) -> bool:
    """Return True if a user message follows another."""
    roles = [message["role"] for message in messages]
    return any(pair == ("user", "user") for pair in pairwise(roles))


def probe(text: str) -> list[dict[str, Any]]:
    """Return a conversation of two user messages, the second of this text."""
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": text}]


def merged(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation with consecutive user messages merged into one."""
    found: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1]["content"] = joined(found[-1]["content"], message["content"])
        else:
            found.append(message)
    return found
