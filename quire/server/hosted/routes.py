"""Endpoints about all models of a server: their states, health, load and metrics, and the page's files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.errors import QuireError
from quire.server import admin
from quire.server.admin import ModelCard, reply
from quire.server.errors import HTTPRefusal
from quire.server.hosted.host import Host, HostedModel
from quire.server.hosted.metrics import HostMetrics
from quire.server.metrics import CONTENT_TYPE
from quire.server.ollama import models as ollama
from quire.server.open_frontend import open_frontend
from quire.server.openapi import describes, document
from quire.server.service import LATEST

_ENCODER = msgspec.json.Encoder()


class HostedCard(ModelCard, kw_only=True):
    """A name of one of several models, or of an adapter of one, with the state of the model.

    `memory_bytes` is what the model needs while it is loaded.
    """

    state: str
    memory_bytes: int
    weight_bytes: int
    load_s: float | None
    idle_s: float | None
    num_open_requests: int
    num_waiting_requests: int


class HostedList(msgspec.Struct):
    """All names of all models, and the memory of the loaded ones."""

    data: list[HostedCard]
    memory_bytes: int
    max_memory_bytes: int
    object: str = "list"
    has_more: bool = False


class ModelHealth(msgspec.Struct):
    """The state of a model, and why it cannot serve requests now, if its engine cannot."""

    state: str
    reason: str | None = None


class HostHealth(msgspec.Struct):
    """Health of the server, and of each model. A model that is not loaded is healthy."""

    status: str
    models: dict[str, ModelHealth]
    reason: str | None = None


class HostLoad(admin.ServerLoad):
    """Load of the server as one model's server reports it, in sums; and of each loaded model."""

    num_requests_loading: int
    memory_bytes: int
    max_memory_bytes: int
    models: dict[str, admin.ServerLoad]


def prepare(
    app: Starlette, host: Host, metrics: HostMetrics, others: Iterable[BaseRoute], keyed: bool
) -> None:
    """Give an application of ROUTES what they need; `others` are the routes of each model."""
    own = {route.path for route in ROUTES}
    rest = [one for one in others if isinstance(one, Route) and one.path not in own]
    app.router.redirect_slashes = False
    app.state.host, app.state.metrics = host, metrics
    app.state.document = document([*rest, *ROUTES], keys=keyed)


def _host(request: Request) -> Host:
    host: Host = request.app.state.host
    return host


def _card(host: Host, model: HostedModel, name: str) -> HostedCard:
    """Return the card of a model under one of its names, or under that of one of its adapters."""
    adapter = None if name in model.names else model.adapters.get(name.removesuffix(LATEST))
    facts, need = model.budget.facts, model.budget.need
    loaded = model.state == "loaded"
    idle_s = round(time.monotonic() - model.used_s, 3) if loaded and not model.num_users else None
    return HostedCard(
        id=name,
        created=host.created_s,
        max_model_len=model.max_model_len,
        root=adapter or model.name,
        parent=model.name if adapter else None,
        display_name=name,
        created_at=datetime.fromtimestamp(host.created_s, UTC).isoformat(),
        max_input_tokens=model.max_model_len,
        state=model.state,
        memory_bytes=need.total_bytes,
        weight_bytes=facts.weight_bytes,
        load_s=round(model.load_s, 3) if model.num_loads else None,
        idle_s=idle_s,
        num_open_requests=model.num_users,
        num_waiting_requests=len(model.waiters),
    )


@describes("List the names of all models and adapters, with the states of the models", reply=HostedList)
async def models(request: Request) -> Response:
    host = _host(request)
    cards = [_card(host, one, name) for one in host.models.values() for name in (*one.names, *one.adapters)]
    return reply(HostedList(cards, host.used_bytes, host.limit_bytes))


@describes("Describe one model", reply=HostedCard)
async def model(request: Request) -> Response:
    host, name = _host(request), request.path_params["model"]
    return reply(_card(host, host.find(name), name))


@describes("Report readiness: 503 while the server ends", reply=HostHealth)
async def ready(request: Request) -> Response:
    """Report the health of all models. One whose engine restarts does not make the others unavailable."""
    host = _host(request)
    found = {}
    for one in host.models.values():
        service = one.service
        reason = service.problem() if service is not None and one.state == "loaded" else None
        found[one.name] = ModelHealth(one.state, reason)
    if host.draining:
        unavailable = HostHealth("unavailable", found, "the server is shutting down")
        return reply(unavailable, 503, {"Retry-After": "1"})
    return reply(HostHealth("ok", found))


@describes("Report running and waiting requests, free KV cache blocks, and memory", reply=HostLoad)
async def load(request: Request) -> Response:
    """Report the sums over all models, and the load of each loaded one."""
    host = _host(request)
    each = {name: admin.load_of(one.service) for name, one in host.models.items() if one.service is not None}
    fields = [field.name for field in msgspec.structs.fields(admin.ServerLoad)]
    sums = {name: sum(getattr(one, name) for one in each.values()) for name in fields}
    num_loading = sum(len(one.waiters) for one in host.models.values())
    sums["server_load"] += num_loading
    found = HostLoad(
        **sums,
        num_requests_loading=num_loading,
        memory_bytes=host.used_bytes,
        max_memory_bytes=host.limit_bytes,
        models=each,
    )
    return reply(found)


@describes("Prometheus metrics of all models, under vLLM's names")
async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(request.app.state.metrics.render)
    return Response(text, media_type=CONTENT_TYPE)


@describes("This document")
async def openapi(request: Request) -> Response:
    return Response(_ENCODER.encode(request.app.state.document), media_type="application/json")


def _listed(model: HostedModel) -> Iterator[tuple[str, str, ollama.Details]]:
    """Yield the names of a model and its adapters, each with its digest and details, in Ollama's form."""
    details = ollama.details_of(model.budget.facts)
    for name in model.names:
        yield ollama.tagged(name), ollama.digest_of(model.name, ""), details
    for name in model.adapters:
        digest = ollama.digest_of(f"{model.name} {name}", "")
        yield ollama.tagged(name), digest, ollama.adapted(details, model.name)


@describes("List the names of all models and adapters, in Ollama's form", reply=ollama.Tags)
async def tags(request: Request) -> Response:
    """List the names of all models, loaded or not."""
    host = _host(request)
    started = datetime.fromtimestamp(host.created_s, UTC)
    found = []
    for one in host.models.values():
        size, capabilities = (
            one.budget.facts.weight_bytes,
            ollama.capabilities_of(one.budget.pooling, one.budget.facts.sees),
        )
        for name, digest, details in _listed(one):
            found.append(ollama.Tag(name, name, started, size, digest, details, capabilities))
    return reply(ollama.Tags(found))


@describes("List the loaded models, in Ollama's form", reply=ollama.Processes)
async def processes(request: Request) -> Response:
    """List the loaded models, each until it would be unloaded without further requests."""
    host, now, found = _host(request), datetime.now(UTC), []
    for one in host.models.values():
        if one.state != "loaded":
            continue
        left_s = one.used_s + one.idle_unload_s - time.monotonic()
        expires = now + timedelta(seconds=left_s) if left_s < MAX_S else ollama.NEVER
        size = one.budget.need.total_bytes
        for name, digest, details in _listed(one):
            found.append(ollama.Running(name, name, size, digest, details, expires, one.max_model_len))
    return reply(ollama.Processes(found))


async def show_unloaded(host: Host, model: HostedModel, name: str) -> Response:
    """Describe a model that is not loaded, in Ollama's form, without loading it."""
    if model.shown is None:
        facts, spec = model.budget.facts, model.spec
        try:
            frontend, output_format = await asyncio.to_thread(
                open_frontend,
                spec.config,
                spec.engine_config,
                max_model_len=facts.max_model_len,
                longest_context=facts.max_model_len,
                sees=facts.sees,
            )
        except QuireError as error:
            words = f"model {model.name!r} cannot be read: {error.message}"
            raise HTTPRefusal(503, words, error.hint, code="model_load_failed") from None
        weights = facts.quantization or "as stored"
        model.shown = ollama.shown(model.name, frontend, output_format, weights, host.created_s)
    is_adapter = name.removesuffix(LATEST) in model.adapters and name not in model.names
    return reply(ollama.named(model.shown, name, model.name if is_adapter else None))


MAX_S = 1e9  # of an idle time that ends
ROUTES: list[Any] = [
    Route("/", admin.root),
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
    Route("/health", ready),
    Route("/health/ready", ready),
    Route("/v1/health", ready),
    Route("/health/live", admin.live),
    Route("/ping", ready, methods=["GET", "POST"]),
    Route("/version", admin.version),
    Route("/load", load),
    Route("/metrics", metrics),
    Route("/openapi.json", openapi),
    Route("/api/tags", tags),
    Route("/api/ps", processes),
    Route("/api/version", ollama.version),
]
