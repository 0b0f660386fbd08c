"""What stands between the network and the application, in order; and the bounds on bodies."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config import ServerConfig
from quire.errors import Overloaded
from quire.server.auth import Hosts, Keys
from quire.server.body import MAX_BODY_BYTES
from quire.server.connection import MAX_HEAD_BYTES, Protocol
from quire.server.errors import Refused, response_for
from quire.server.logs import RequestLog
from quire.server.metrics import Metrics

MAX_UPLOADS_BYTES = 16 * MAX_BODY_BYTES  # of all bodies that are on their way
KEEP_ALIVE_S = 75  # more than clients keep an idle connection, so that they close it and not we
OPEN_FILES = 1 << 16
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = ("x-request-id", "retry-after")


class Bodies:
    """Lets through bodies of JSON that are not compressed, up to MAX_BODY_BYTES.

    A page of another origin can send text or a form without being asked, and JSON only when CORS allows
    it: so everything that changes something must be called with JSON. (Nothing does without a body.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_uploading = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (refused := _refused(scope)) is not None:
            await response_for(refused, scope["path"])(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what the application receives, whatever the headers say of it."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            num_bytes = len(message.get("body", b""))
            size += num_bytes
            self._num_uploading += num_bytes
            if size > MAX_BODY_BYTES:
                raise _too_large()
            if self._num_uploading > MAX_UPLOADS_BYTES:
                raise Overloaded("too many large requests are on their way")
            if not message.get("more_body"):
                release()
            return message

        def release() -> None:
            nonlocal size
            self._num_uploading -= size
            size = 0

        try:
            await self._app(scope, counted, send)
        finally:
            release()


def _refused(scope: Scope) -> Refused | None:
    """Why a body cannot be taken, as far as its headers tell."""
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return Refused(415, "compressed bodies are not taken", "send it without Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return _too_large()
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    empty = int(length) == 0 and b"transfer-encoding" not in headers
    if scope["method"] in ("POST", "PUT", "PATCH", "DELETE") and kind != b"application/json" and not empty:
        return Refused(415, "the body must be JSON", "send Content-Type: application/json")
    return None


def _too_large() -> Refused:
    return Refused(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")


def wrap(app: ASGIApp, config: ServerConfig, keys: Iterable[str], metrics: Metrics) -> ASGIApp:
    """The application behind its guards; the one named last here is met first."""
    app = Bodies(app)
    app = Keys(app, keys)
    if config.allowed_origins:
        app = CORSMiddleware(app, config.allowed_origins, _METHODS, ("*",), expose_headers=_EXPOSED)
    app = Hosts(app, config.host, config.allowed_hosts)
    return RequestLog(app, metrics, log_prompts=config.log_prompts)


def http_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn runs the wrapped application. Also lets the process open as many files as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return uvicorn.Config(
        app,
        config.host,
        config.port,
        http=Protocol,  # never what happens to be installed: the limits are h11's and ours
        ws="none",
        loop="asyncio",
        interface="asgi3",
        proxy_headers=False,  # anyone can send them
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
