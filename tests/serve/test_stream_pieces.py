"""Pieces of a stream on a real socket: they go past the layers that an answer passes once."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncGenerator, Callable

import pytest
from guarded import Quick, parse, serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.openai import stream
from quire.server.openai.stream import EventStream

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
