"""The ASGI application: all endpoints, and the middleware in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config import ServerConfig
from quire.errors import QuireError
from quire.server import admin, steps, traces
from quire.server.anthropic import messages
from quire.server.auth import AllowedHosts, ApiKeys
from quire.server.body import MAX_BODY_BYTES, too_large
from quire.server.errors import HTTPRefusal, response_for
from quire.server.llamacpp import routes as llamacpp
from quire.server.logs import RequestLog
from quire.server.metrics import Metrics
from quire.server.ollama import models as ollama
from quire.server.openai import chat, completions, responses
from quire.server.request import RequestMiddleware
from quire.server.service import QueueFull, ServiceState

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = ("x-request-id", "retry-after")


def make_app(service: ServiceState, keys: tuple[str, ...]) -> ASGIApp:
    """Return all routes over one ServiceState, with their middleware. No `keys`: no key is required."""
    app = Starlette(
        routes=[
            *(*chat.ROUTES, *completions.ROUTES, *responses.ROUTES, *messages.ROUTES, *admin.ROUTES),
            *steps.ROUTES,
            *traces.ROUTES,
            *llamacpp.ROUTES,
            *ollama.ROUTES,
        ],
        middleware=[Middleware(RequestMiddleware, service)],
        exception_handlers={QuireError: _refuse, HTTPException: _refuse, Exception: _refuse},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return guarded(app, service.config, keys, service.metrics)


async def _refuse(request: Request, error: Exception) -> Response:
    path = request.url.path
    request.state.shed = isinstance(error, QueueFull)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        words = f"there is no {request.method} {path[:200]}"
        hint = "/openapi.json lists all endpoints"
        error = HTTPRefusal(error.status_code, words, hint, headers=error.headers)
    return response_for(error, path)


def guarded(app: ASGIApp, config: ServerConfig, keys: Iterable[str], metrics: Metrics) -> ASGIApp:
    """Return an application behind checks of the host, the key and the body's head, CORS, and the log.

    Keys are checked after CORS: browsers send preflight requests without one.
    """
    app = Guard(Guard(app, check_body), ApiKeys(keys))
    if config.allowed_origins:
        app = CORSMiddleware(app, config.allowed_origins, _METHODS, ("*",), expose_headers=_EXPOSED)
    app = Guard(app, AllowedHosts(config.host, config.allowed_hosts))
    return RequestLog(app, metrics, log_prompts=config.log_prompts)


class Guard:
    """ASGI middleware that answers a request with the refusal of a check, which sees its head alone."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], HTTPRefusal | None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else response_for(refusal, scope["path"])
        await app(scope, receive, send)


def check_body(scope: Scope) -> HTTPRefusal | None:
    """Refuse bodies that are compressed, not JSON, or too large, as far as headers tell.

    A page of another origin can send text or a form without permission, but JSON only when CORS allows it: so
    every request that has an effect must have a JSON body.
    """
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return HTTPRefusal(415, "compressed bodies are not supported", "send it without Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return too_large()
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    empty = int(length) == 0 and b"transfer-encoding" not in headers
    if scope["method"] in ("POST", "PUT", "PATCH", "DELETE") and kind != b"application/json" and not empty:
        return HTTPRefusal(415, "the body must be JSON", "send Content-Type: application/json")
    return None
