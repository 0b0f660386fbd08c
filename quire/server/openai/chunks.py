"""Chunks of OpenAI's streams."""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import Any

from quire.server.event_stream import encode, grouped, id_groups
from quire.server.logprob_json import LogprobCursor
from quire.server.service import ServiceState

NOTHING = b',"logprobs":null'
OPEN = b',"finish_reason":null'


class Chunks:
    """Chunks of one stream: {"id": ..., "choices": [{"index": ..., BODY, DETAILS, FINISH}], EXTRA}.

    `warnings`, if there are any, come with the first.
    """

    def __init__(self, head: dict[str, Any], warnings: list[str]) -> None:
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._once = added({"warnings": warnings}) if warnings else b""

    def choice(
        self, index: int, body: bytes, details: bytes, finish: bytes = OPEN, extra: bytes = b""
    ) -> bytes:
        """A chunk of one choice."""
        if self._once:
            extra, self._once = extra + self._once, b""
        return b'%s{"index":%d,%s%s%s}]%s}\n\n' % (self._head, index, body, details, finish, extra)

    def none(self, extra: bytes) -> bytes:
        """A chunk of no choice."""
        return b"%s]%s}\n\n" % (self._head, extra)


def head_of(serving: ServiceState, request_id: str, model: str) -> dict[str, Any]:
    """What a response says of itself, and each chunk of a stream."""
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": serving.fingerprint,
    }


def finished(reason: str | None, stop_reason: str | int | None) -> bytes:
    """How a choice ended."""
    return added({"finish_reason": reason, "stop_reason": stop_reason})


def added(fields: dict[str, Any]) -> bytes:
    """More fields of an object that is being written."""
    return b"," + encode(fields)[1:-1]


def details(told: LogprobCursor, with_ids: bool) -> list[bytes]:
    """What chunks say of the tokens that are new: logprobs and ids, in parts that fit; at least one."""
    if told.shape is None and not with_ids:
        return [NOTHING]
    token_ids, positions = told.advance()
    shape = told.shape
    logprobs = [b',"logprobs":' + shape.join(group) for group in grouped(positions)] if shape else []
    ids = [b',"token_ids":' + encode(group) for group in id_groups(token_ids)] if with_ids else []
    return [(p or NOTHING) + i for p, i in zip_longest(logprobs, ids, fillvalue=b"")] or [NOTHING]
