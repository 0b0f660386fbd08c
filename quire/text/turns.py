"""Messages of one user after another, for chat templates in which users and assistants must take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire.text.late_system import joined

Message = Mapping[str, Any]


def repeats(messages: Sequence[Message]) -> bool:
    """True if a user's message follows another."""
    roles = [message["role"] for message in messages]
    return any(pair == ("user", "user") for pair in pairwise(roles))


def probe(text: str) -> list[dict[str, Any]]:
    """A conversation in which the user says this in a second message."""
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": text}]


def merged(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same conversation in which a user says at once what stands in consecutive messages."""
    found: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1]["content"] = joined(found[-1]["content"], message["content"])
        else:
            found.append(message)
    return found
