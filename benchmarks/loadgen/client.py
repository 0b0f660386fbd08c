"""A lean HTTP client: connections that are kept, bodies given to a callback the moment they come.

It shares the machine with the server it measures, so it does little: one protocol object a connection, no
streams, no copies, one look at the clock for each read.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from loadgen.wire import BadReply, EventSplitter, ReplyParser

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
    headers: Mapping[str, str]
    body: bytes = b""
    end_s: float = 0.0  # of time.perf_counter
    hung_up: bool = False


@dataclass(slots=True)
class _Exchange:
    """One request on a connection, until its reply is complete."""

    on_event: OnEvent | None
    done: asyncio.Future[Reply]
    parser: ReplyParser = field(default_factory=ReplyParser)
    splitter: EventSplitter = field(default_factory=EventSplitter)
    body: bytearray = field(default_factory=bytearray)


class _Connection(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None
        self.is_used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _RECEIVED

    def buffer_updated(self, num_bytes: int) -> None:
        now_s = time.perf_counter()
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            return
        try:
            body = exchange.parser.feed(_RECEIVED[:num_bytes].tobytes())
            hung_up = bool(body) and self._take(exchange, body, now_s)
        except Exception as error:  # of the callback too: its request fails, not the loop
            exchange.done.set_exception(error)
            return
        if hung_up or exchange.parser.is_done:
            self._finish(exchange, now_s, hung_up)

    def _take(self, exchange: _Exchange, body: bytes, now_s: float) -> bool:
        """True when the callback wants no more."""
        on_event = exchange.on_event
        if on_event is None or not exchange.parser.is_event_stream:
            exchange.body += body
            return False
        return any(on_event(data, now_s) for data in exchange.splitter.feed(body))

    def _finish(self, exchange: _Exchange, now_s: float, hung_up: bool) -> None:
        parser = exchange.parser
        exchange.done.set_result(Reply(parser.status, parser.headers, bytes(exchange.body), now_s, hung_up))

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self.transport = self.exchange, None
        if exchange is None or exchange.done.done():
            return
        if exchange.parser.end():
            self._finish(exchange, time.perf_counter(), False)
        else:
            exchange.done.set_exception(Lost("connection lost"))


def _expire(done: asyncio.Future[Reply]) -> None:
    if not done.done():
        done.set_exception(TimeoutError())


class Client:
    """Talks to one server. `timeout_s` bounds a whole exchange."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self.timeout_s = timeout_s
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = f"Host: {parts.netloc}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        return await self._send(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> Reply:
        """Raises Lost, BadReply, OSError, TimeoutError, and what the callback raises."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._send(head.encode() + body, on_event)

    async def _send(self, data: bytes, on_event: OnEvent | None) -> Reply:
        while True:
            connection = await self._connect()
            is_reused = connection.is_used
            try:
                return await self._exchange(connection, data, on_event)
            except Lost:
                exchange = connection.exchange
                if not is_reused or (exchange and exchange.parser.status):
                    raise  # else the server had closed a connection that was idle: once more on another

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return (await asyncio.wait_for(opening, self.timeout_s))[1]

    async def _exchange(self, connection: _Connection, data: bytes, on_event: OnEvent | None) -> Reply:
        loop, transport = asyncio.get_running_loop(), connection.transport
        if transport is None:
            raise Lost("connection lost")
        exchange = connection.exchange = _Exchange(on_event, loop.create_future())
        connection.is_used = True
        is_kept = False
        expiry = loop.call_later(self.timeout_s, _expire, exchange.done)
        try:
            transport.write(data)
            reply = await exchange.done
            is_kept = not reply.hung_up and exchange.parser.keeps_alive
        finally:
            expiry.cancel()
            if is_kept:
                self._idle.append(connection)
            else:
                transport.abort()
        return reply

    def close(self) -> None:
        """Give up the connections that are idle."""
        for connection in self._idle:
            if connection.transport:
                connection.transport.close()
        self._idle.clear()


__all__ = ["BadReply", "Client", "Lost", "OnEvent", "Reply"]
