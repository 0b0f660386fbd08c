"""A lean HTTP client: connections that are kept, bodies given to a callback the moment they come.

It shares the machine with the server it measures, so it does little: one object a connection and one an
exchange, no tasks, streams or copies, one look at the clock for each read.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from loadgen.wire import BadReply, EventSplitter, ReplyParser, header

# Takes the data of one event and when it came; True hangs up.
OnEvent = Callable[[bytes, float], bool | None]
# What was received, until it was looked at: of all connections, for their event loop is the only one. With
# buffers of its own asyncio asks the system for memory, and gives it back, at each read.
_RECEIVED = memoryview(bytearray(1 << 18))


class Lost(Exception):
    """The connection ended before the reply did."""


@dataclass(slots=True)
class Reply:
    """A whole reply. The body of an event stream is left out: its events went to the callback."""

    status: int
    head: bytes
    body: bytes = b""
    end_s: float = 0.0  # of time.perf_counter
    hung_up: bool = False

    def header(self, name: str) -> str:
        """The value of a header, whose name is given in small letters, or nothing."""
        return header(self.head, name.encode()).decode("latin-1")


OnEnd = Callable[[Reply | Exception], None]  # takes the reply, or why there is none


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, until its reply is complete or it fails."""

    request: bytes
    on_event: OnEvent | None
    on_end: OnEnd | None  # None when it has been called
    connection: _Connection | None = None
    parser: ReplyParser = field(default_factory=ReplyParser)
    splitter: EventSplitter = field(default_factory=EventSplitter)
    body: bytes = b""
    hung_up: bool = False

    def take(self, data: bytes, now_s: float) -> bool:
        """Take received bytes. Returns True when the reply is complete, or no more is wanted of it."""
        body = self.parser.feed(data)
        if self.on_event is None or not self.parser.is_event_stream:
            self.body += body
        elif body:
            self.hung_up = any(self.on_event(event, now_s) for event in self.splitter.feed(body))
        return self.hung_up or self.parser.is_done

    def reply(self, now_s: float) -> Reply:
        """As far as it has come."""
        parser = self.parser
        return Reply(parser.status, parser.head, self.body, now_s, self.hung_up)


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, client: Client) -> None:
        self.transport: asyncio.Transport | None = None
        self._client = client
        self._exchange: Exchange | None = None
        self._is_reused = False

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def start(self, exchange: Exchange) -> None:
        self._exchange, exchange.connection = exchange, self
        if self.transport is not None:
            self.transport.write(exchange.request)

    def abandon(self) -> None:
        """Nobody waits for the reply any more."""
        self._exchange = None
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _RECEIVED

    def buffer_updated(self, num_bytes: int) -> None:
        now_s, exchange = time.perf_counter(), self._exchange
        if exchange is None:
            return
        try:
            is_over = exchange.take(_RECEIVED[:num_bytes].tobytes(), now_s)
        except Exception as error:  # of the callback too: its request fails, not the loop
            self._client.end(exchange, error)
            return
        if is_over and exchange.parser.keeps_alive and not exchange.hung_up:
            self._exchange, exchange.connection, self._is_reused = None, None, True
            self._client.idle.append(self)
        if is_over:
            self._client.end(exchange, exchange.reply(now_s))

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self._exchange, self.transport = self._exchange, None, None
        if exchange is None:
            return
        if exchange.parser.end():
            self._client.end(exchange, exchange.reply(time.perf_counter()))
        elif self._is_reused and not exchange.parser.has_begun:
            self._client.send(exchange)  # the server had closed a connection that was idle: on another
        else:
            self._client.end(exchange, Lost("connection lost"))


def _settle(ended: asyncio.Future[Reply], outcome: Reply | Exception) -> None:
    if ended.done():
        return
    if isinstance(outcome, Exception):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)


class Client:
    """Talks to one server. `timeout_s` bounds a whole exchange."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self.timeout_s = timeout_s
        self.idle: list[_Connection] = []
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = f"Host: {parts.netloc}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._due: dict[Exchange, float] = {}  # when those that are open expire, the first of them first
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def get(self, path: str) -> Reply:
        return await self._reply(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> Reply:
        """Raises Lost, BadReply, OSError, TimeoutError, and what the callback raises."""
        return await self._reply(self._post(path, body), on_event)

    def begin_post(self, path: str, body: bytes, on_event: OnEvent | None, on_end: OnEnd) -> None:
        """As post, without a task: `on_end` is called later, with what that returns or raises."""
        self._begin(Exchange(self._post(path, body), on_event, on_end))

    def _post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _reply(self, request: bytes, on_event: OnEvent | None) -> Reply:
        ended: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        exchange = Exchange(request, on_event, partial(_settle, ended))
        self._begin(exchange)
        try:
            return await ended
        finally:
            self.end(exchange, Lost("nobody waits for it"))

    def _begin(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        self._due[exchange] = due_s = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._expire)
        self.send(exchange)

    def send(self, exchange: Exchange) -> None:
        """On a connection that is idle, or a new one."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                connection.start(exchange)
                return
        opening = asyncio.get_running_loop().create_task(self._open(exchange))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, exchange: Exchange) -> None:
        loop, make = asyncio.get_running_loop(), partial(_Connection, self)
        try:
            _, connection = await loop.create_connection(make, self._host, self._port, ssl=self._tls)
        except OSError as error:
            self.end(exchange, error)
            return
        if exchange.on_end is None:  # it has expired meanwhile
            connection.abandon()
        else:
            connection.start(exchange)

    def end(self, exchange: Exchange, outcome: Reply | Exception) -> None:
        """Once; what comes later is nothing. A connection that is still its own is closed."""
        on_end, exchange.on_end = exchange.on_end, None
        if on_end is None:
            return
        del self._due[exchange]
        connection, exchange.connection = exchange.connection, None
        if connection is not None:
            connection.abandon()
        on_end(outcome)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, now_s = None, loop.time()
        for exchange, due_s in list(self._due.items()):
            if due_s > now_s:
                self._timer = loop.call_at(due_s, self._expire)
                break
            self.end(exchange, TimeoutError())

    def close(self) -> None:
        """Give up the connections that are idle."""
        for connection in self.idle:
            connection.abandon()
        self.idle.clear()


__all__ = ["BadReply", "Client", "Lost", "OnEvent", "Reply"]
