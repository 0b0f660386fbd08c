"""Pieces of a stream on a real socket: they go past the layers that an answer passes once."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncGenerator, Callable

import pytest
from guarded import Quick, parse, serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import event_stream as stream
from quire.server.connection import Joined
from quire.server.event_stream import EventStream

Events = Callable[[], AsyncGenerator[bytes, None]]
SENT = (b"data: 1\n\n", b"", b"data: 2\n\n", b"", b"data: [DONE]\n\n")  # nothing to say is not the end


async def some() -> AsyncGenerator[bytes, None]:
    for event in SENT[:-1]:
        yield event
        await asyncio.sleep(0)


def streaming(events: Events, layered: list[str] | None = None) -> ASGIApp:
    """An application that streams; `layered` takes the types of what it sends through all layers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if layered is not None and scope["type"] == "http":
                layered.append(message["type"])
            await send(message)

        await EventStream(events())(scope, receive, noted)

    return app


def test_pieces_are_chunks() -> None:
    layered: list[str] = []
    with serve(app=streaming(some, layered)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        for _ in range(2):  # the connection goes on
            connection.request("GET", "/")
            reply = connection.getresponse()
            assert reply.headers["transfer-encoding"] == "chunked"
            assert reply.read() == b"".join(SENT)
        connection.close()
        raw = server.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    assert parse(raw)[2] == b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in (*filter(None, SENT), b""))
    assert layered == ["http.response.start", "http.response.body"] * 3


def test_a_head_comes_with_what_follows_it() -> None:
    """And the last piece with the end: each packet costs both sides a call of the system."""
    read = [threading.Event(), threading.Event()]

    async def two() -> AsyncGenerator[bytes, None]:
        for number, event in enumerate(read):
            yield b"data: %d\n\n" % number
            await asyncio.to_thread(event.wait, 10)

    request = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serve() as server, server.connect() as client:
        client.sendall(request % b"/size")
        status, headers, body = parse(client.recv(65536))
        assert (status, len(body)) == (200, int(headers["content-length"]))
    with serve(app=streaming(two)) as server, server.connect() as client:
        client.sendall(request % b"/")
        assert client.recv(65536).endswith(b"\r\n\r\n9\r\ndata: 0\n\n\r\n")
        read[0].set()
        assert client.recv(65536) == b"9\r\ndata: 1\n\n\r\n"
        read[1].set()
        assert client.recv(65536) == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_pieces_of_an_older_version_are_plain() -> None:
    with serve(app=streaming(some)) as server:
        status, headers, body = parse(server.send(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))
    assert (status, body) == (200, b"".join(SENT))
    assert "transfer-encoding" not in headers


def test_silences_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.15)

    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.1)
    with serve(app=streaming(slow)) as server:
        answer = parse(server.send(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))
    assert answer[2] == b"data: 1\n\n: keep-alive\n\ndata: [DONE]\n\n"


def test_pieces_wait_for_their_reader() -> None:
    """For one who reads nothing no more is made than the socket holds, until its connection is ended."""
    made, ended = [], []

    async def long() -> AsyncGenerator[bytes, None]:
        for _ in range(1000):
            made.append(1)
            yield b"x" * 65536
        ended.append(True)

    with serve(app=streaming(long), protocol=Quick) as server, server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        time.sleep(Quick.unread_s / 2)
        held = len(made)
        time.sleep(Quick.unread_s / 4)
        assert 0 < held == len(made) < 1000
        end = time.monotonic() + 5
        while not ended and time.monotonic() < end:
            time.sleep(0.02)
    assert ended == [True]


def test_nothing_stays_held() -> None:
    told: list[object] = []

    class Transport:
        write = told.append
        is_closing = staticmethod(bool)

        def close(self) -> None:
            told.append("closed")

    async def main() -> None:
        joined = Joined(Transport(), asyncio.get_running_loop())  # type: ignore[arg-type]
        joined.write(b"alone")
        assert told == []
        await asyncio.sleep(0)
        assert told == [b"alone"]
        joined.write(b"last")
        joined.close()
        await asyncio.sleep(0)  # what was to send it later finds nothing

    asyncio.run(main())
    assert told == [b"alone", b"last", "closed"]
