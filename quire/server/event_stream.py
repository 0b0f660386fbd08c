"""Server-sent events, and the sizes into which long texts are split for them.

No event reaches 64 KiB, whatever the request asks for: clients read with buffers of that size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

from msgspec.json import Encoder
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.server.errors import ErrorBody, response_for
from quire.server.logprob_json import Position

FIRST_S = 2.0  # an error within this time is an HTTP status; later, the stream has begun
KEEP_ALIVE_S = 15.0  # a comment is sent after so long a silence
PIECE_CHARACTERS = 4096  # of text in one chunk; a character takes at most 6 bytes in JSON
PIECE_BYTES = 24 << 10  # of log-probabilities in one chunk
PIECE_TOKENS = 1024  # token ids in one chunk
DONE = b"data: [DONE]\n\n"
_LOG = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]

encode = Encoder().encode


class EventStream(Response):
    """A streamed response. `on_error` serializes the event of an error, `end` is the last event.

    An error before the first event, within FIRST_S, is a plain HTTP response. `keep_alive` breaks silences.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[Exception], bytes] | None = None,
        end: bytes = DONE,
        keep_alive: bytes = b": keep-alive\n\n",
    ) -> None:
        super().__init__()
        self._events = events
        self._on_error = on_error or (lambda error: b"data: %s\n\n" % encode(ErrorBody.of(error)))
        self._end = end
        self._keep_alive = keep_alive
        self._silent = True  # since the keep-alive task last looked
        self.raw_headers = [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write_by_asgi(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        first = asyncio.ensure_future(anext(self._events, b""))
        try:
            await asyncio.wait((first,), timeout=FIRST_S)
            if first.done() and (error := first.exception()) is not None:
                if not isinstance(error, QuireError):
                    raise error
                await response_for(error, scope["path"])(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            write = scope.get("state", {}).get("write_piece") or write_by_asgi
            if begun := first.done():
                await write(first.result())  # in one packet with the head
            keeping_alive = asyncio.create_task(self._send_keep_alives(write))
            try:
                # In a task of its own: a token then wakes this coroutine and no middleware above it.
                await asyncio.create_task(self._send_all(None if begun else first, send, write))
            finally:
                keeping_alive.cancel()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait((first,))
            await self._events.aclose()

    async def _send_all(self, first: asyncio.Future[bytes] | None, send: Send, write: Write) -> None:
        try:
            if first is not None:
                await write(await first)
            async for event in self._events:
                self._silent = False
                await write(event)
            last = self._end
        except Exception as error:
            if not isinstance(error, QuireError):
                _LOG.exception("a stream failed")
            last = self._on_error(error) + self._end
        await send({"type": "http.response.body", "body": last})

    async def _send_keep_alives(self, write: Write) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._silent:
                await write(self._keep_alive)


def pieces(text: str) -> Iterator[str]:
    """Split a text into parts that each fit into one chunk; at least one."""
    if len(text) <= PIECE_CHARACTERS:
        yield text
        return
    for begin in range(0, len(text), PIECE_CHARACTERS):
        yield text[begin : begin + PIECE_CHARACTERS]


def grouped(positions: Sequence[Position]) -> Iterator[Sequence[Position]]:
    """Split consecutive positions into groups that each fit into one chunk."""
    begin = size = 0
    for end, position in enumerate(positions):
        length = sum(map(len, position)) + len(position)
        if size and size + length > PIECE_BYTES:
            yield positions[begin:end]
            begin, size = end, 0
        size += length
    if size:
        yield positions[begin:]


def id_groups(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split consecutive token ids into groups that each fit into one chunk."""
    for begin in range(0, len(token_ids), PIECE_TOKENS):
        yield token_ids[begin : begin + PIECE_TOKENS]
