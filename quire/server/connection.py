"""One client's connection: HTTP/1.1 by h11 and uvicorn, with bounds on the resources of a client.

Bounded are the head of a request (bytes, headers, time), the number of chunks of a body and its time, the
time an answer may stay unread, and the number of connections. request.py bounds the bytes of bodies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quire.server.errors import HTTPRefusal, raw_response

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
# Short chunks cost as much as long ones: beyond MANY_CHUNKS they must have MIN_CHUNK_BYTES on average.
MANY_CHUNKS = 2048
MIN_CHUNK_BYTES = 64
# Chunk sizes, line ends, extensions and trailers; a quarter of the data is added to this.
MAX_FRAMING_BYTES = 64 << 10
RESERVED_FILES = 64  # descriptors kept free of connections
MIN_READ_BYTES = 64 << 10  # of an answer that lies unread, in each Protocol.unread_s
_LOG = logging.getLogger("quire.server.http")


class Parser(h11.Connection):
    """h11 with limits. `refusal` holds the answer to a request that broke one."""

    refusal: HTTPRefusal | None = None
    _num_chunks = 0
    _num_bytes = 0  # of the body
    _num_received = 0  # since the head
    _is_chunked = False

    def receive_data(self, data: bytes) -> None:
        """Receive as h11 does, and count."""
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event as h11 does. Raises RemoteProtocolError for a broken limit, too."""
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
                self._refuse(HTTPRefusal(400, "the body has too many small chunks", hint))
        elif isinstance(event, h11.EndOfMessage) and len(event.headers) > MAX_HEADERS:
            self._refuse(_large_head())
        if self._is_chunked and self.their_state is h11.SEND_BODY:
            self._check_chunk(event)
        return event

    def _begin(self, event: h11.Request) -> None:
        """Check a head, and start counting its body."""
        self._num_chunks = self._num_bytes = 0
        self._num_received = len(self.trailing_data[0])
        size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
        if size > MAX_HEAD_BYTES or len(event.headers) > MAX_HEADERS:
            self._refuse(_large_head())
        names = {name for name, _ in event.headers}
        self._is_chunked = b"transfer-encoding" in names
        if self._is_chunked and b"content-length" in names:
            # A proxy may use one of them and this server the other: one's body would be the other's next
            # request.
            hint = "send one of them"
            self._refuse(HTTPRefusal(400, "the request has both Content-Length and Transfer-Encoding", hint))

    def _check_chunk(self, event: object) -> None:
        """Bound the framing between the data of chunks, once all received data has been read."""
        framing = self._num_received - self._num_bytes
        if event is h11.NEED_DATA and framing > MAX_FRAMING_BYTES + self._num_bytes // 4:
            problem = "the body has too much chunk framing for its data"
            self._refuse(HTTPRefusal(400, problem, "leave out chunk extensions and trailers"))

    def _refuse(self, refusal: HTTPRefusal) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.message, error_status_hint=refusal.status)


def _improper(error: h11.RemoteProtocolError) -> HTTPRefusal:
    """Return the refusal for an error of h11."""
    if error.error_status_hint == 431:
        return _large_head()
    if error.error_status_hint == 501:
        problem = "the only supported transfer coding is chunked, once"
        return HTTPRefusal(400, problem, "send Transfer-Encoding: chunked, or a Content-Length")
    return HTTPRefusal(400, "the request is not proper HTTP/1.1")


def _large_head() -> HTTPRefusal:
    return HTTPRefusal(431, f"a head has at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES:,} bytes")


class Joined:
    """A transport that sends a head and the first piece of a body in one packet.

    Written data waits for the next write, at most until this turn of the event loop ends.
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
        """Send the held data and this, if there is any."""
        data, self._held = self._held + data, b""
        if data:
            self._transport.write(data)

    def write_eof(self) -> None:
        self.send()
        self._transport.write_eof()

    def close(self) -> None:
        self.send()
        self._transport.close()


class Pieces:
    """Fast path: writes the chunks of a stream to the transport, bypassing ASGI and h11."""

    def __init__(self, transport: Joined, flow: FlowControl, parser: Parser) -> None:
        self._transport = transport
        self._flow = flow
        self._parser = parser

    async def write(self, data: bytes) -> None:
        """Send a piece of a body without Content-Length, after its head. Waits for a slow client."""
        if data and not self._transport.is_closing():
            is_chunked = (self._parser.their_http_version or b"") >= b"1.1"
            self._transport.send(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            if self._flow.write_paused:
                await self._flow.drain()


class Protocol(H11Protocol):
    """uvicorn's connection with a deadline for each of its phases. Times are in seconds.

    Phases: "new" (nothing received yet), "head" and "body" (in transit), "linger" (the answer is sent, the
    client still sends), "" (the server's turn, or uvicorn's keep-alive timer runs).
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
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # it would log query strings
        self.conn: Parser = Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._phase = ""
        self._since_s = 0.0
        self._due_s = math.inf  # the deadline of the phase
        self._timer: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send small writes at once, and start the deadline of a head."""
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
        if self.timeout_keep_alive_task is not None:  # uvicorn lets it run after a reset
            self.timeout_keep_alive_task.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch(heard=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(heard=bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def _await_reader(self, num_unread: int | None = None) -> None:
        """End the connection unless enough of `num_unread` bytes was read, and look again later."""
        left = self.transport.get_write_buffer_size()
        if num_unread is not None and left > num_unread - MIN_READ_BYTES:
            self.transport.abort()
            return
        self._unread_deadline = self.loop.call_later(self.unread_s, self._await_reader, left)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 or a limit refused. The parser knows more than `msg`."""
        self._refuse(self.conn.refusal or HTTPRefusal(400, msg))

    def shutdown(self) -> None:
        """End the connection with the server, unless an answer is on its way."""
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _watch(self, heard: bool) -> None:
        """Enter the phase that fits h11's state. `heard`: the client has sent data since the last request."""
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
        """Start a phase. Most are short, so a running timer stays and compares deadlines when it fires."""
        if phase == self._phase:
            return
        self._phase, self._since_s = phase, self.loop.time()
        self._due_s = math.inf if seconds is None else self._since_s + seconds
        if seconds is not None and (self._timer is None or self._timer.when() > self._due_s):
            self._wake()

    def _wake(self) -> None:
        """Set the timer to the deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._due_s == math.inf else self.loop.call_at(self._due_s, self._expire)

    def _expire(self) -> None:
        """End a connection whose deadline has passed."""
        self._timer = None
        if self.loop.time() < self._due_s:
            self._wake()
        elif self._phase in ("head", "body"):
            self._refuse(HTTPRefusal(408, f"the {self._phase} of the request did not come in time"))
        else:
            self.transport.abort()

    def _refuse(self, error: HTTPRefusal) -> None:
        """Answer without the application, as it has not begun to, and end the connection.

        Further data of the client is read and dropped for a while: closing at once would reset the
        connection, and the client might never read the answer.
        """
        if self._phase == "linger":  # the answer has been sent
            self.transport.abort()
            return
        cycle, self._refused = self.cycle, True
        if cycle is None or cycle.response_complete:
            _LOG.info("refused", extra={"fields": {"status": error.status, "why": error.message}})
        else:
            cycle.disconnected = True  # the application's answer is dropped
            cycle.message_event.set()
            cycle.scope["state"]["refused"] = error.status
            if cycle.response_started:
                self.transport.abort()
                return
        head, body = raw_response(error)
        self.transport.write(b"%bconnection: close\r\n\r\n%b" % (head, body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._enter("linger", self.linger_s)

    def _make_room(self) -> None:
        """End the connection that has waited longest for its client: descriptors are running out.

        One that was ended already is still counted until the next turn of the event loop.
        """
        waiting = [
            one
            for one in self.connections
            if isinstance(one, Protocol) and one.awaits_client and not one.transport.is_closing()
        ]
        min(waiting, key=lambda one: one._since_s).transport.abort()

    @property
    def awaits_client(self) -> bool:
        """True when no request is being answered."""
        return self.cycle is None or self.cycle.response_complete
