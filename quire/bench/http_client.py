"""A small HTTP/1.1 client: connections are kept open, and events are given to a callback as they arrive.

It shares the machine with the server it measures, so it must cost little: one object for a connection and one
for an exchange; no tasks, streams or copies; one reading of the clock for each read.
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

from quire.bench.http_reply import EventSplitter, ReplyParser, header
from quire.errors import ConfigError, quoted

# Takes the data of one event and when it came; True closes the connection.
OnEvent = Callable[[bytes, float], bool | None]
# Received bytes of all connections, until they are parsed: one event loop serves them all. With a buffer for
# each read, asyncio would ask the system for memory and return it at each of them.
_RECEIVED = memoryview(bytearray(1 << 18))


GIVEN_UP = "given up"


class Lost(Exception):
    """The connection ended before the reply did."""


@dataclass(slots=True)
class HttpReply:
    """A whole reply. The body of an event stream is left out: its events went to the callback."""

    status: int
    head: bytes
    body: bytes = b""
    end_s: float = 0.0  # of time.perf_counter
    hung_up: bool = False

    def header(self, name: str) -> str:
        """Return the value of a header, whose name is given in small letters, or nothing."""
        return header(self.head, name.encode()).decode("latin-1")


OnEnd = Callable[[HttpReply | Exception], None]  # takes the reply, or why there is none


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
        """Take received bytes. Return True when the reply is complete, or no more of it is wanted."""
        body = self.parser.feed(data)
        if self.on_event is None or not self.parser.is_event_stream:
            self.body += body
        elif body:
            self.hung_up = any(self.on_event(event, now_s) for event in self.splitter.feed(body))
        return self.hung_up or self.parser.is_done

    def reply(self, now_s: float) -> HttpReply:
        """Return the reply as far as it has come."""
        parser = self.parser
        return HttpReply(parser.status, parser.head, self.body, now_s, self.hung_up)


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
        """Close: nobody waits for the reply any more."""
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
            self._client.send(exchange)  # the server had closed the idle connection: use another one
        else:
            self._client.end(exchange, Lost("connection lost"))


def _settle(ended: asyncio.Future[HttpReply], outcome: HttpReply | Exception) -> None:
    if ended.done():
        return
    if isinstance(outcome, Exception):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)


class Client:
    """A client of one server. `timeout_s` bounds a whole exchange. Raises ConfigError for an unusable URL."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{quoted(url)} is not the address of a server", "write http://HOST:PORT")
        self.timeout_s = timeout_s
        self.idle: list[_Connection] = []
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._due: dict[Exchange, float] = {}  # when open exchanges expire, the first of them first
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def get(self, path: str) -> HttpReply:
        """Raise what `post` raises."""
        return await self._reply(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> HttpReply:
        """Raise Lost, BadReply, OSError, TimeoutError, or an exception of the callback."""
        return await self._reply(self._post(path, body), on_event)

    def begin_post(self, path: str, body: bytes, on_event: OnEvent | None, on_end: OnEnd) -> None:
        """Post without a task: `on_end` is called later with what `post` returns or raises."""
        self._begin(Exchange(self._post(path, body), on_event, on_end))

    def _post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _reply(self, request: bytes, on_event: OnEvent | None) -> HttpReply:
        ended: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
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
        """Send on an idle connection, or a new one."""
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
        except (OSError, UnicodeError) as error:  # of a host's name that cannot be one
            self.end(exchange, error)
            return
        if exchange.on_end is None:  # it has expired meanwhile
            connection.abandon()
        else:
            connection.start(exchange)

    def end(self, exchange: Exchange, outcome: HttpReply | Exception) -> None:
        """End an exchange, once: later calls do nothing. A connection that it still has is closed."""
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

    def give_up(self) -> None:
        """End all open exchanges."""
        for exchange in list(self._due):
            self.end(exchange, Lost(GIVEN_UP))

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self.idle:
            connection.abandon()
        self.idle.clear()
