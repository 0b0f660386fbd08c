"""A client that behaves badly: it reads byte by byte, slowly or not at all, and leaves at any moment.

What it reads it takes apart by itself, strictly: HTTP/1.1, chunks and events.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from requests_over_http import address, written
from server import Server

WORDS = ["a", "lamp", "by", "the", "quiet", "harbour", "and", "the", "fox", "who", "counts", "boats"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]

Body = dict[str, Any]


class Reply:
    """Takes apart what a server sends, however it is cut. `events` and `body` grow."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.events: list[str] = []
        self.ended = False
        self.rest = b""  # what follows the end
        self._text = b""
        self._left: int | None = None  # bytes of the body or chunk that are still to come

    def push(self, data: bytes) -> None:
        """Read on. AssertionError for what is not proper."""
        self.rest += data
        while not self.ended and self._step():
            pass

    def _step(self) -> bool:
        if not self.status:
            return self._head()
        if self._left is None:
            return self._chunk()
        taken, self.rest = self.rest[: self._left], self.rest[self._left :]
        self._left -= len(taken)
        self._take(taken)
        if self._left == 0 and "content-length" in self.headers:
            self.ended = True
        elif self._left == 0 and self.rest[:2] == b"\r\n":
            self.rest, self._left = self.rest[2:], None
            return True
        return False

    def _head(self) -> bool:
        head, end, rest = self.rest.partition(b"\r\n\r\n")
        if not end:
            return False
        line, *fields = head.decode("ascii").split("\r\n")
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        self.status, self.rest = int(status), rest
        self.headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        if "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        else:
            assert self.headers["transfer-encoding"] == "chunked"
        return True

    def _chunk(self) -> bool:
        line, end, rest = self.rest.partition(b"\r\n")
        if not end:
            return False
        size = int(line, 16)
        if size:
            self._left, self.rest = size, rest
            return True
        if self.rest[:5] != b"0\r\n\r\n":
            assert len(self.rest) < 5
            return False
        self.rest, self.ended = self.rest[5:], True
        assert not self._text, "an event has no end"
        return False

    def _take(self, data: bytes) -> None:
        self.body += data
        if self.headers["content-type"] != "text/event-stream; charset=utf-8":
            return
        *whole, self._text = (self._text + data).split(b"\n\n")
        for event in whole:
            assert event.startswith((b"data: ", b"event: ", b": ")), event
            self.events.append(event.decode())


def connect(server: Server, receive_bytes: int | None = None) -> socket.socket:
    """A socket to it; `receive_bytes` bounds what the system reads ahead."""
    connection = socket.socket()
    connection.settimeout(30)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(address(server))
    return connection


def read(connection: socket.socket, size: int, before: bytes = b"") -> Reply:
    """A reply, at most so many bytes at a time. `before`: what has been read of it."""
    reply = Reply()
    reply.push(before)
    while not reply.ended:
        data = connection.recv(size)
        assert data, f"cut off: {reply.body!r}"
        reply.push(data)
    return reply


def arrivals(connection: socket.socket) -> list[float]:
    """When each piece of a stream came, in seconds."""
    reply, times = Reply(), []
    while not reply.ended:
        data = connection.recv(1 << 16)
        assert data
        reply.push(data)
        times.append(time.monotonic())
    return times


def requests(rng: random.Random, paths: list[str]) -> Iterator[tuple[str, Body]]:
    """Requests of every kind, without end. `paths` are those of the endpoints that there are."""
    while True:
        text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 200])))
        turns = [{"role": "user", "content": text}]
        body: Body = {"stream": rng.random() < 0.7, "temperature": 1.0}
        path = rng.choice(paths)
        if path.endswith("/completions"):
            body |= {
                "seed": rng.getrandbits(32),
                "ignore_eos": rng.random() < 0.5,
                "n": rng.choice([1, 1, 3]),
            }
        if path == "/v1/completions":
            body |= {"prompt": [text, "b"] if rng.random() < 0.3 else text, "max_tokens": 400}
            body |= rng.choice(
                [{}, {"logprobs": 5}, {"echo": True}, {"structured_outputs": {"json": SCHEMA}}]
            )
        elif path == "/v1/chat/completions":
            body |= {"messages": turns, "max_tokens": 400}
            body |= rng.choice([{}, {"logprobs": True}, {"tools": TOOLS, "tool_choice": "required"}])
        elif path == "/v1/messages":
            body |= {"model": "demo", "messages": turns, "max_tokens": 400}
        else:
            body |= {"input": text, "max_output_tokens": 400}
        yield path, body


def misbehave(server: Server, path: str, body: Body, rng: random.Random) -> str:
    """Send a request and leave, at any moment and in any way; which one."""
    raw = written(body, path)
    when = rng.choice(["asking", "asked", "later", "head", "reading", "reading"])
    with connect(server, rng.choice([None, 4096])) as connection:
        if when == "asking":
            connection.sendall(raw[: rng.randrange(len(raw))])
        else:
            connection.sendall(raw)
        if when == "later":
            time.sleep(rng.random() ** 3 * 0.3)
        elif when == "head":
            connection.recv(rng.randrange(1, 30))
        elif when == "reading":
            left = rng.randrange(1, 20_000)
            while left > 0 and (data := connection.recv(min(left, rng.choice([1, 100, 1 << 14])))):
                left -= len(data)
        how = rng.choice(["close", "reset", "half"])
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "half":
            connection.shutdown(socket.SHUT_WR)
            time.sleep(rng.random() * 0.02)
    return f"{when} {how}"


def whole(server: Server, path: str, body: Body) -> Any:
    """An answer that was read to the end, as JSON."""
    with connect(server) as connection:
        connection.sendall(written(body, path))
        reply = read(connection, 1 << 16)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)
