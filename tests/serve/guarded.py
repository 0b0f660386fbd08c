"""An application behind the server's guards, on a real socket; and the plain sockets that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.config import EngineConfig, ServerConfig
from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.engine.status import EngineStatus, Facts
from quire.errors import Overloaded, QuireError, RequestError
from quire.server.app import guarded as guarded_app
from quire.server.connection import Protocol
from quire.server.errors import response_for
from quire.server.lifecycle import http_config
from quire.server.metrics import Metrics
from quire.server.request import RequestMiddleware


class Quick(Protocol):
    """Deadlines that a test can wait for."""

    head_s = 0.3
    body_s = 0.4
    linger_s = 0.3
    unread_s = 0.4


@dataclass
class Guarded:
    """A running server. `seen` is what its application noted, in order."""

    port: int = 0
    seen: list[str] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: make_metrics())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, data: bytes) -> bytes:
        """All that comes back until the server closes; what it does not take is not sent."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            return read_all(connection)

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        lines = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"} | (headers or {})
        if body:
            lines.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return parse(self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body))


def read_all(connection: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return bytes(found)


def read_one(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer, of a connection that stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(4096) or b"\r\n\r\n"
    while len(parse(found)[2]) < int(parse(found)[1]["content-length"]):
        found += connection.recv(4096)
    return parse(found)


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *headers = head.decode("latin-1").split("\r\n")
    return int(line.split()[1]), {k.lower(): v for k, v in (h.split(": ", 1) for h in headers)}, body


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """Status and code of an error in OpenAI's shape."""
    return answer[0], json.loads(answer[2])["error"]["code"]


def ended(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of requests that have ended."""
    deadline = time.monotonic() + 2
    while not any(record.message == "request" for record in caplog.records) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [record.fields for record in caplog.records if record.message == "request"]


def make_metrics(model_name: str = "demo", **engine: Any) -> Metrics:
    status = EngineStatus(
        state="ready",
        facts=Facts({}, RequestLimits(2048, (BlockGroup(100),), 16, 64), 2048),
        num_free_blocks=75,
    )
    return Metrics(model_name, EngineConfig(**engine), lambda: {0: status})


def application(seen: list[str]) -> Starlette:
    """Endpoints of every kind of behaviour."""

    async def size(request: Request) -> Response:
        seen.append(request.url.query or "size")
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
        await asyncio.sleep(float(request.query_params.get("wait_s", 0)))
        client = request.client.host if request.client else None
        return JSONResponse({"size": num_bytes, "tenant": request.state.tenant, "client": client})

    async def endless(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                seen.append("endless ended")

        return StreamingResponse(chunks())

    async def fail(request: Request) -> Response:
        raise {
            "request": RequestError("the seed is wrong", None, "seed"),
            "full": Overloaded("the queue is full", None, 3),
        }.get(request.path_params["how"]) or KeyError(f"/usr/lib/python3/{request.path_params['how']}")

    async def broken(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            raise ValueError("in the middle")

        return StreamingResponse(chunks())

    async def talk(request: Request) -> Response:
        request.state.tokens = (7, 5)
        request.state.prompt = "the secret of the user"
        request.state.answer = "the secret of the model"
        return PlainTextResponse("said")

    async def busy(request: Request) -> Response:
        time.sleep(0.4)  # the event loop does nothing else meanwhile
        return PlainTextResponse("done")

    return Starlette(
        routes=[
            Route("/busy", busy),
            Route("/size", size, methods=["GET", "POST", "PUT", "DELETE"]),
            Route("/endless", endless),
            Route("/fail/{how:path}", fail),
            Route("/broken", broken),
            Route("/talk", talk),
            Route("/health", talk),
            Route("/v1/models/{model:path}", talk),
        ],
        exception_handlers={
            QuireError: lambda request, error: response_for(error),
            Exception: lambda request, error: response_for(error),
        },
    )


@contextlib.contextmanager
def serve(
    keys: tuple[str, ...] = (),
    protocol: type[Protocol] | None = None,
    app: ASGIApp | None = None,
    wrapped: ASGIApp | None = None,
    **config: Any,
) -> Iterator[Guarded]:
    """Run the application in a thread of this process, with the server's own settings of uvicorn."""
    guarded = Guarded()
    chosen = ServerConfig(**config)
    service: Any = SimpleNamespace(
        config=chosen, metrics=guarded.metrics, requests=set(), refusing=False, num_uploading_bytes=0
    )
    service.num_queued_requests = 0
    if app is None:
        app = application(guarded.seen)
        app.add_middleware(RequestMiddleware, service=service)
    guards = wrapped or guarded_app(app, chosen, keys, guarded.metrics.http)
    settings = http_config(guards, chosen)
    settings.http = protocol or settings.http
    settings.timeout_graceful_shutdown = 1
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    guarded.port = listener.getsockname()[1]
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield guarded
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        if thread.is_alive():
            raise RuntimeError("the server does not end")
