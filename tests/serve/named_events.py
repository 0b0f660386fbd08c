"""Streams of named events, and a scripted run of a conversation."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx

from quire.server.chat_task import ChatEvent, TokenUsage
from quire.server.event_stream import EventStream

Object = dict[str, Any]


def parse(text: str) -> list[Object]:
    """Parse the events of a stream; check that the name of each is its type."""
    found = []
    *events, rest = text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def events(client: httpx.Client, path: str, **body: Any) -> list[Object]:
    """Return the events that a server streams. Raises AssertionError for an error."""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse(reply.read().decode())


class ScriptedRun:
    """A substitute for a ChatRun of one choice: batches of events, then an error if there is one."""

    def __init__(self, *batches: list[ChatEvent], error: Exception | None = None) -> None:
        self.timings = lambda: defaultdict(float)
        self.handle = SimpleNamespace(fingerprint="f")
        self._batches, self._error = batches, error

    async def batches(self) -> AsyncIterator[list[tuple[int, ChatEvent]]]:
        for batch in self._batches:
            yield [(0, event) for event in batch]
        if self._error is not None:
            raise self._error

    def usage(self) -> TokenUsage:
        return TokenUsage(10, 4, 20, 5)


def sent(
    stream: AsyncGenerator[bytes, None],
    failed: Callable[[Exception], bytes],
    alive: bytes = b"",
    parts: list[bytes] | None = None,
) -> list[Object]:
    """Return the events sent to a client that reads them all. `parts` takes their bytes as they are sent."""
    parts = [] if parts is None else parts

    async def receive() -> Object:
        raise AssertionError

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {"type": "http", "path": "/v1/x"}
    asyncio.run(EventStream(stream, failed, b"", alive)(scope, receive, send))
    return parse(b"".join(parts).decode())
