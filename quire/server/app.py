"""The ASGI application: all endpoints, and what stands in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.errors import QuireError
from quire.server import admin
from quire.server.anthropic import messages
from quire.server.errors import HTTPRefusal, response_for
from quire.server.exchange import Exchanges
from quire.server.limits import wrap
from quire.server.llamacpp import routes as llamacpp
from quire.server.ollama import models as ollama
from quire.server.openai import chat, completions, responses
from quire.server.service import ServiceState


def make_app(serving: ServiceState, keys: tuple[str, ...]) -> ASGIApp:
    """All routes over one ServiceState, behind their guards. `keys` are asked for unless there are none."""
    app = Starlette(
        routes=[
            *(*chat.ROUTES, *completions.ROUTES, *responses.ROUTES, *messages.ROUTES, *admin.ROUTES),
            *llamacpp.ROUTES,
            *ollama.ROUTES,
        ],
        middleware=[Middleware(Exchanges, serving)],
        exception_handlers={QuireError: _refuse, HTTPException: _refuse, Exception: _refuse},
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return wrap(app, serving.config, keys, serving.metrics)


async def _refuse(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        words = f"there is no {request.method} {path[:200]}"
        error = HTTPRefusal(
            error.status_code, words, "/openapi.json lists what there is", headers=error.headers
        )
    return response_for(error, path)
