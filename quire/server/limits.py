"""What stands between the network and the application, in order; and the bounds on bodies."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config import ServerConfig
from quire.errors import Overloaded
from quire.server.auth import Hosts, Keys
from quire.server.body import MAX_BODY_BYTES, too_large
from quire.server.connection import MAX_HEAD_BYTES, Protocol, TurnAway
from quire.server.errors import HTTPRefusal, response_for
from quire.server.logs import RequestLog
from quire.server.metrics import Metrics

MAX_UPLOADS_BYTES = 16 * MAX_BODY_BYTES  # of all bodies that are on their way
KEEP_ALIVE_S = 75  # more than clients keep an idle connection, so that they close it and not we
OPEN_FILES = 1 << 16
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = ("x-request-id", "retry-after")

Check = Callable[[Scope], HTTPRefusal | None]  # why a request is refused, by its head alone


class Guard:
    """ASGI middleware that lets through what a check does not refuse."""

    def __init__(self, app: ASGIApp, check: Check) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope) if scope["type"] == "http" else None
        app = self._app if refused is None else response_for(refused, scope["path"])
        await app(scope, receive, send)


class Bodies:
    """ASGI middleware that counts what the application receives, whatever the headers say of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_uploading = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            num_bytes = len(message.get("body", b""))
            size += num_bytes
            self._num_uploading += num_bytes
            if size > MAX_BODY_BYTES:
                raise too_large()
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


def check_body(scope: Scope) -> HTTPRefusal | None:
    """Bodies are JSON that is not compressed, up to MAX_BODY_BYTES, as far as headers tell.

    A page of another origin can send text or a form without being asked, and JSON only when CORS allows
    it: so everything that changes something must be called with JSON. (Nothing does without a body.)
    """
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return HTTPRefusal(415, "compressed bodies are not taken", "send it without Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return too_large()
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    empty = int(length) == 0 and b"transfer-encoding" not in headers
    if scope["method"] in ("POST", "PUT", "PATCH", "DELETE") and kind != b"application/json" and not empty:
        return HTTPRefusal(415, "the body must be JSON", "send Content-Type: application/json")
    return None


def wrap(app: ASGIApp, config: ServerConfig, keys: Iterable[str], metrics: Metrics) -> ASGIApp:
    """The application behind its guards; the one named last here is met first."""
    host_check, key_check, body_check = checks(config, keys)
    app = Guard(Guard(Bodies(app), body_check), key_check)
    if config.allowed_origins:
        app = CORSMiddleware(app, config.allowed_origins, _METHODS, ("*",), expose_headers=_EXPOSED)
    return RequestLog(Guard(app, host_check), metrics, log_prompts=config.log_prompts)


def checks(config: ServerConfig, keys: Iterable[str]) -> tuple[Check, Check, Check]:
    """What is asked of a request's head: of its host, its key and its body."""
    return Hosts(config.host, config.allowed_hosts), Keys(keys), check_body


def http_config(app: ASGIApp, config: ServerConfig, turn_away: TurnAway | None = None) -> uvicorn.Config:
    """How uvicorn runs the wrapped application. Also lets the process open as many files as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return uvicorn.Config(
        app,
        config.host,
        config.port,
        # Never what happens to be installed: the limits are h11's and ours.
        http=cast(Any, partial(Protocol, turn_away=turn_away)),
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
