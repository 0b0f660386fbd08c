"""The ASGI application: all endpoints, and the middleware in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config import EngineConfig, ServerConfig
from quire.environment import user_path
from quire.errors import QuireError
from quire.server import admin, replica_routes, steps, traces
from quire.server.anthropic import messages
from quire.server.auth import AllowedHosts, ApiKeys, OwnPage
from quire.server.body import MAX_BODY_BYTES, too_large
from quire.server.errors import HTTPRefusal, response_for
from quire.server.llamacpp import routes as llamacpp
from quire.server.logs import RequestLog
from quire.server.metrics import HttpCounts
from quire.server.ollama import embeddings as ollama_embeddings
from quire.server.ollama import models as ollama
from quire.server.openai import adapters, chat, completions, responses
from quire.server.page import events, experiments
from quire.server.page.static import StaticPage
from quire.server.pooling import embeddings, scores
from quire.server.request import RequestMiddleware
from quire.server.service import QueueFull, ServiceState
from quire.transfer.segment_folder import folder_secret

LIVE_ROUTES = (*events.ROUTES, *experiments.ROUTES)  # of the page, about the engine that runs
# Endpoints that refuse every request, whatever the model
REFUSALS = (
    *(ollama.refuse, llamacpp.change_props, llamacpp.change_slot),
    *(responses.stored, responses.compact, responses.websocket),
)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = ("x-request-id", "x-quire-tag", "retry-after")


def make_app(service: ServiceState, keys: tuple[str, ...], *, named_outside: bool = False) -> ASGIApp:
    """Return all routes over one ServiceState, with their middleware. No `keys`: no key is required.

    `named_outside`: see RequestLog.
    """
    if service.config.load_adapters:
        adapters.check(service.engine_config, bool(keys))
        adapters.changing(service)
    page = StaticPage() if service.config.page else None
    app = model_app(service, page)
    open_paths = page.paths if page is not None else ()
    secret = kept_secret(service.config, service.engine_config) if keys else None
    return guarded(app, service.config, keys, service.metrics.http, open_paths, secret, named_outside)


def model_app(service: ServiceState, page: StaticPage | None) -> Starlette:
    """Return the routes of one model, without the checks in front of them."""
    app = Starlette(
        routes=[
            *routes_of(page),
            *(adapters.ROUTES if service.config.load_adapters else ()),
            *(replica_routes.ROUTES if service.replicas is not None else ()),
        ],
        middleware=[Middleware(RequestMiddleware, service)],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def routes_of(page: StaticPage | None) -> list[BaseRoute]:
    """Return the routes of every model."""
    return [
        *((*LIVE_ROUTES, *page.routes) if page is not None else ()),
        *(*chat.ROUTES, *completions.ROUTES, *responses.ROUTES, *messages.ROUTES, *admin.ROUTES),
        *(*embeddings.ROUTES, *scores.ROUTES, *steps.ROUTES),
        *traces.ROUTES,
        *llamacpp.ROUTES,
        *ollama_embeddings.ROUTES,
        *ollama.ROUTES,
    ]


def kept_secret(config: ServerConfig, engine_config: EngineConfig) -> bytes | None:
    """Return the secret for salts of keys, if blocks under them are kept in files. Raises ConfigError."""
    if not config.cache_per_key or engine_config.prefix_cache_dir is None:
        return None
    return folder_secret(user_path(engine_config.prefix_cache_dir))


async def refuse(request: Request, error: Exception) -> Response:
    """Return the response for an error of an endpoint."""
    path = request.url.path
    request.state.shed = isinstance(error, QueueFull)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        words = f"there is no {request.method} {path[:200]}"
        error = HTTPRefusal(error.status_code, words, _existing(request), headers=error.headers)
    return response_for(error, path)


def _existing(request: Request) -> str:
    """Return which endpoint may be meant: clients append their paths to a base URL, with /v1 or without."""
    path = request.url.path
    for other in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        scope = {**request.scope, "path": other}
        if other != path and any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return f"{other[:200]} exists: check the client's base URL"
    return "/openapi.json lists all endpoints"


HANDLERS = {QuireError: refuse, HTTPException: refuse, Exception: refuse}


def guarded(
    app: ASGIApp,
    config: ServerConfig,
    keys: Iterable[str],
    count: HttpCounts,
    open_paths: Iterable[str] = (),
    secret: bytes | None = None,
    named_outside: bool = False,
) -> ASGIApp:
    """Return an application behind checks of the host, the key, the origin and the body's head, CORS, and
    the log. `open_paths` need no key; `secret` is that of ApiKeys, `named_outside` of RequestLog.

    Keys are checked after CORS: browsers send preflight requests without one.
    """
    app = Guard(Guard(app, check_body), OwnPage(config.allowed_origins))
    app = Guard(app, ApiKeys(keys, open_paths, secret))
    if config.allowed_origins:
        app = CORSMiddleware(app, config.allowed_origins, _METHODS, ("*",), expose_headers=_EXPOSED)
    app = Guard(app, AllowedHosts(config.host, config.allowed_hosts))
    return RequestLog(app, count, log_prompts=config.log_prompts, named_outside=named_outside)


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

    A page of another origin can send text, a form or nothing without permission, but JSON only when CORS
    allows it: so every request that has an effect must say that it is JSON, also without a body if it is of
    a page.
    """
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return HTTPRefusal(415, "compressed bodies are not supported", "send it without Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return too_large()
    empty = int(length) == 0 and b"transfer-encoding" not in headers
    has_effect = scope["method"] in ("POST", "PUT", "PATCH", "DELETE")
    if has_effect and not (empty and not _is_of_page(headers)) and not _is_json(scope, headers):
        return HTTPRefusal(415, "the body must be JSON", "send Content-Type: application/json")
    return None


_ANY_TYPE = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")  # the last is curl's


def _is_json(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return True if the body is JSON, as far as headers tell.

    Ollama reads bodies of any type: its documentation calls curl without one, and LiteLLM sends none or, with
    aiohttp, that of octets. A page can do so, too.
    """
    kind = headers.get(b"content-type", b"")
    if scope["path"].startswith("/api/") and kind in _ANY_TYPE:
        return not _is_of_page(headers)
    return kind.partition(b";")[0].strip().lower() == b"application/json"


def _is_of_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a page may have sent a request: browsers say so in headers that scripts cannot set."""
    return not headers.keys().isdisjoint((b"origin", b"sec-fetch-site"))
