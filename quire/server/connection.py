"""One client's connection: HTTP/1.1 by h11 and uvicorn, with bounds on what a client can make it hold.

Bounded are the head of a request (bytes, headers, time), the number of chunks of a body and the time it
takes, how long a client may leave an answer unread, and the number of connections. Bytes of bodies are
bounded in limits.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quire.server.body import MAX_BODY_BYTES, too_large
from quire.server.errors import HTTPRefusal, written

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
# A chunk costs the same however short it is: from MANY_CHUNKS on they must be of MIN_CHUNK_BYTES on average.
MANY_CHUNKS = 2048
MIN_CHUNK_BYTES = 64
# Beside their data: sizes, ends, extensions, trailers. A quarter of the data comes on top.
MAX_FRAMING_BYTES = 64 << 10
RESERVED_FILES = 64  # descriptors that no connection may take
_BOTH_IDLE = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
_LOG = logging.getLogger("quire.server.http")


class Parser(h11.Connection):
    """h11, refusing what is too large. `refusal` says why, once it has."""

    refusal: HTTPRefusal | None = None
    _num_chunks = 0
    _num_bytes = 0  # of the body
    _num_received = 0  # since the head
    _is_chunked = False

    def receive_data(self, data: bytes) -> None:
        """As h11's."""
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's. Raises RemoteProtocolError for what is refused, too."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = _improper(error)
            raise
        if isinstance(event, h11.Request):
            self._begin(event)
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(MANY_CHUNKS, self._num_bytes // MIN_CHUNK_BYTES):
                hint = f"send chunks of at least {MIN_CHUNK_BYTES} bytes, or a Content-Length"
                self._refuse(HTTPRefusal(400, "the body comes in too many small chunks", hint))
        elif isinstance(event, h11.EndOfMessage) and len(event.headers) > MAX_HEADERS:
            self._refuse(_large_head())
        if self._is_chunked and self.their_state is h11.SEND_BODY:
            self._check_chunk(event)
        return event

    def _begin(self, event: h11.Request) -> None:
        """Check a head, and count from here."""
        self._num_chunks = self._num_bytes = 0
        self._num_received = len(self.trailing_data[0])
        size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
        if size > MAX_HEAD_BYTES or len(event.headers) > MAX_HEADERS:
            self._refuse(_large_head())
        names = {name for name, _ in event.headers}
        self._is_chunked = b"transfer-encoding" in names
        if self._is_chunked and b"content-length" in names:
            # A proxy may go by the one, we by the other: what one takes for a body is a request to the other.
            hint = "send one of them"
            self._refuse(HTTPRefusal(400, "the request has both Content-Length and Transfer-Encoding", hint))

    def _check_chunk(self, event: object) -> None:
        """Bound what a chunk says of its size, and what comes beside data, once all data that came is out."""
        # h11 tells nobody how much of a chunk is still to come, and takes up to 20 digits.
        if self._num_bytes + getattr(self._reader, "_bytes_in_chunk", 0) > MAX_BODY_BYTES:
            self._refuse(too_large())
        framing = self._num_received - self._num_bytes
        if event is h11.NEED_DATA and framing > MAX_FRAMING_BYTES + self._num_bytes // 4:
            problem = "the chunks of the body bring too much beside their data"
            self._refuse(HTTPRefusal(400, problem, "leave out chunk extensions and trailers"))

    def _refuse(self, refusal: HTTPRefusal) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.message, error_status_hint=refusal.status)


def _improper(error: h11.RemoteProtocolError) -> HTTPRefusal:
    """Return the refusal for an error of h11, in our words."""
    if error.error_status_hint == 431:
        return _large_head()
    if error.error_status_hint == 501:
        problem = "of transfer codings only chunked is taken, once"
        return HTTPRefusal(400, problem, "send Transfer-Encoding: chunked, or a Content-Length")
    return HTTPRefusal(400, "the request is not proper HTTP/1.1")


def _large_head() -> HTTPRefusal:
    return HTTPRefusal(431, f"a head has at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES:,} bytes")


class Joined:
    """A transport that sends a head together with what follows it: a packet costs both sides a system call.

    What is written waits for the next thing that is, and not beyond this turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            self.send(data)
        elif data:
            self._held = data
            self._loop.call_soon(self.send)

    def send(self, data: bytes = b"") -> None:
        """Send what is held, and this. Nothing is no packet, and may come after the end."""
        data, self._held = self._held + data, b""
        if data:
            self._transport.write(data)

    def write_eof(self) -> None:
        self.send()
        self._transport.write_eof()

    def close(self) -> None:
        self.send()
        self._transport.close()

    def let_go(self) -> None:
        """At the end: asyncio's transports hold themselves, 1.1 KB each, until the collector comes."""
        vars(self._transport).pop("_read_ready_cb", None)


class Pieces:
    """The short way of a stream's pieces to its socket, since each token is one: past all layers and h11."""

    def __init__(self, transport: Joined, flow: FlowControl, parser: Parser) -> None:
        self._transport = transport
        self._flow = flow
        self._parser = parser

    async def write(self, data: bytes) -> None:
        """Send a piece of a body without a length, after its head. Waits for a client that is slow."""
        if data and not self._transport.is_closing():
            is_chunked = (self._parser.their_http_version or b"") >= b"1.1"
            self._transport.send(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            if self._flow.write_paused:
                await self._flow.drain()


class Refusal(NamedTuple):
    """The answer to a request that is not read, and how many bytes of its body are still to come."""

    answer: bytes
    num_to_come: int


TurnAway = Callable[[bytes], Refusal | None]  # by what a request begins with


class Protocol(H11Protocol):
    """uvicorn's connection with a deadline for each of its phases. Times are in seconds.

    `turn_away` may answer requests before they are read.

    Phases: "new" (nothing heard yet), "head" and "body" (one is on its way), "linger" (the answer is sent,
    the client still talks), "kept" (after a request that was turned away), "" (it is the server's turn, or
    uvicorn's own keep-alive timer runs).
    """

    head_s = 10.0
    body_s = 60.0
    linger_s = 5.0
    unread_s = 120.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        turn_away: TurnAway | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # it would show what stands in queries
        self.conn: Parser = Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._phase = ""
        self._since_s = 0.0
        self._due_s = math.inf  # when the phase is too long
        self._timer: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self._turn_away = turn_away
        self._num_unwanted = 0  # bytes that are still to come of the body of a request that was turned away

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here. Small writes leave at once, and the time for a head runs."""
        super().connection_made(transport)
        if (own := transport.get_extra_info("socket")).family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does so only where the listener names its protocol. Without it a small write waits for
            # the client to acknowledge the one before: 40 ms.
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        joined = Joined(transport, self.loop)
        self.transport = cast(asyncio.Transport, joined)
        self.app_state = {**self.app_state, "write_piece": Pieces(joined, self.flow, self.conn).write}
        self._enter("new", self.head_s)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("lost", None)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn lets it run after a reset
        cast(Joined, self.transport).let_go()

    def data_received(self, data: bytes) -> None:
        if self._num_unwanted:
            self._num_unwanted, data = max(self._num_unwanted - len(data), 0), data[self._num_unwanted :]
            self._await_next()
        if self._refused or not data:
            return
        refusal = self._turn_away(data) if self._turn_away is not None and self._is_idle else None
        if refusal is None:
            super().data_received(data)
            self._watch(heard=True)
        else:
            self._unset_keepalive_if_required()
            cast(Joined, self.transport).send(refusal.answer)
            self._num_unwanted = refusal.num_to_come
            self._await_next()

    @property
    def _is_idle(self) -> bool:
        """Whether what comes next is the beginning of a request, and its answer would be read."""
        begins = self.conn.states == _BOTH_IDLE and not self.conn.trailing_data[0]
        return begins and not self.flow.write_paused

    def _await_next(self) -> None:
        """After a request that was turned away: the rest of it, then the next one, or the end."""
        if self._num_unwanted:
            self._enter("linger", self.linger_s)
        else:
            self._phase = ""  # each wait is a new one
            self._enter("kept", self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(heard=bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_deadline = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what h11 refuses; `msg` says less than the parser knows."""
        self._refuse(self.conn.refusal or HTTPRefusal(400, msg))

    def shutdown(self) -> None:
        """The server ends: so does a connection that waits for nothing."""
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is served as if it had not asked."""

    def _watch(self, heard: bool) -> None:
        """Note what is awaited of the client. `heard`: it has sent something since the last request."""
        their_state = self.conn.their_state
        if self._refused or self.transport.is_closing():
            return
        if their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._enter("linger", self.linger_s)
        elif their_state is h11.SEND_BODY:
            self._enter("body", self.body_s)
        elif their_state is h11.IDLE and heard:
            self._enter("head", self.head_s)
        else:
            self._enter("", None)

    def _enter(self, phase: str, seconds: float | None) -> None:
        """Phases are many and few last: a timer that is there stays, and looks when it comes."""
        if phase == self._phase:
            return
        self._phase, self._since_s = phase, self.loop.time()
        self._due_s = math.inf if seconds is None else self._since_s + seconds
        if seconds is not None and (self._timer is None or self._timer.when() > self._due_s):
            self._wake()

    def _wake(self) -> None:
        """Set the timer for when the phase is too long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._due_s == math.inf else self.loop.call_at(self._due_s, self._expire)

    def _expire(self) -> None:
        """The client may have taken too long."""
        self._timer = None
        if self.loop.time() < self._due_s:
            self._wake()
        elif self._phase in ("head", "body"):
            self._refuse(HTTPRefusal(408, f"the {self._phase} of the request did not come in time"))
        else:
            self.transport.abort()

    def _refuse(self, error: HTTPRefusal) -> None:
        """Answer without the application, as it has not begun to, and end the connection.

        What the client still sends is read and dropped for a while: closing at once would reset the
        connection, and it might never read the answer.
        """
        if self._phase == "linger":  # it has its answer
            self.transport.abort()
            return
        cycle, self._refused = self.cycle, True
        if cycle is None or cycle.response_complete:
            _LOG.info("refused", extra={"fields": {"status": error.status, "why": error.message}})
        else:
            cycle.disconnected = True  # what the application says now is dropped
            cycle.message_event.set()
            cycle.scope["state"]["refused"] = error.status
            if cycle.response_started:
                self.transport.abort()
                return
        head, body = written(error)
        self.transport.write(b"%bconnection: close\r\n\r\n%b" % (head, body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._enter("linger", self.linger_s)

    def _make_room(self) -> None:
        """Descriptors run out: end the connection that has waited longest for its client."""
        waiting = [c for c in self.connections if isinstance(c, Protocol) and c.awaits_client]
        min(waiting, key=lambda one: one._since_s).transport.abort()

    @property
    def awaits_client(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete
