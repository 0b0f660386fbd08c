"""Requests to a server that run while a test does something else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from server import Server

STORY = "Once upon a time"
# Another text each time, in which nothing repeats: drafts would end it soon.
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 1000, "ignore_eos": True, "temperature": 2}
SHORT: dict[str, Any] = {"prompt": STORY, "max_tokens": 8, "ignore_eos": True, "seed": 1}


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until the condition is true; AssertionError when it is not, in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def idle(server: Server) -> bool:
    """Whether nothing is left of any request, in either process."""
    load = server.load()
    counts = ("server_load", "num_requests_running", "num_requests_waiting", "num_requests_queued")
    nothing = not any(load[name] for name in (*counts, "num_tokens_queued"))
    return nothing and load["num_free_blocks"] == load["num_blocks"]


def address(server: Server) -> tuple[str, int]:
    """Where its socket listens."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def written(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    content = httpx.Request("POST", "http://x/", json=body).content
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return (head + kind).encode() + content


class Background:
    """A completion in a thread of its own: streamed, unless `stream` is false."""

    def __init__(self, server: Server, body: dict[str, Any], stream: bool = True) -> None:
        self.status = 0
        self.first = threading.Event()
        self._lines: list[str] = []
        self._socket = socket.create_connection(address(server), timeout=60)
        self._socket.sendall(written(body | {"stream": stream}))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._socket, self._socket.makefile("rb") as file:
            words = file.readline().split()
            self.status = int(words[1]) if words else 0
            for line in file:
                if line.startswith((b"data: ", b"{")):
                    self._lines.append(line.decode().strip().removeprefix("data: "))
                    self.first.set()
        self.first.set()

    def leave(self) -> None:
        """Close the connection without a word."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def end(self, seconds: float = 60) -> list[str]:
        """Wait for the end; the events without their prefix, or the body."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the request did not end"
        return self._lines
