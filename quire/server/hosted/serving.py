"""Serve several models: their memory is planned, and each is loaded when it is first asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from quire.backends.device import without_gpu
from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.app import HANDLERS, LIVE_ROUTES, REFUSALS, guarded, kept_secret, model_app, routes_of
from quire.server.hosted.budget import Allotment, ModelSpec, budgets
from quire.server.hosted.door import Door
from quire.server.hosted.host import Host, HostedModel, Loaded
from quire.server.hosted.metrics import HostMetrics
from quire.server.hosted.routes import ROUTES, prepare, show_unloaded
from quire.server.ollama import models as ollama
from quire.server.openai import adapters
from quire.server.page.static import StaticPage
from quire.server.service import ServiceState

if TYPE_CHECKING:
    from quire.server.lifecycle import Context, Opened

Load = Callable[..., AbstractAsyncContextManager[ServiceState]]
Ready = Callable[[Host, str, bool], None]  # with the URL, and whether requests need a key
_LOG = logging.getLogger(__name__)


def open_models(
    config: ServerConfig, specs: Sequence[ModelSpec], load: Load, ready: Ready
) -> Callable[[tuple[str, ...]], Context]:
    """Return what lifecycle.serve_opened serves: models that are loaded by `load`, which is lifecycle.loaded.

    Raises ConfigError for options that are not for several models, and for one that cannot be loaded.
    """
    _check(config, specs)
    specs = [replace(spec, engine_config=without_gpu(spec.engine_config)) for spec in specs]
    limit_bytes, parts = budgets(specs, config.max_loaded_memory)

    @asynccontextmanager
    async def opened(keys: tuple[str, ...]) -> AsyncIterator[Opened]:
        @asynccontextmanager
        async def open_model(spec: ModelSpec, budget: Allotment) -> AsyncIterator[Loaded]:
            opening = load(
                spec.config,
                spec.engine_config,
                bool(keys),
                measure=True,
                available_bytes=budget.engine_bytes,
                num_sharing=budget.num_sharing,
            )
            async with opening as service:
                service.names_elsewhere = lambda: host.names_beside(spec.name)
                yield service, model_app(service, page)

        if config.load_adapters:
            for spec in specs:
                adapters.check(spec.engine_config, bool(keys))
        models = [HostedModel(*pair, config.idle_unload) for pair in zip(specs, parts, strict=True)]
        host = Host(config, models, limit_bytes, open_model)
        page = StaticPage() if config.page else None
        metrics = HostMetrics(host)
        passed = LIVE_ROUTES if page is not None else ()
        own = [*(page.routes if page is not None else ()), *ROUTES]
        own_app = Starlette(routes=own, exception_handlers=HANDLERS)
        prepare(own_app, host, metrics, routes_of(None), bool(keys))
        changing = adapters.ROUTES if config.load_adapters else ()
        every = Starlette(routes=[*own, *routes_of(None), *passed, *changing], exception_handlers=HANDLERS)
        every.router.redirect_slashes = False
        door = Door(host, own_app, own, passed, every, REFUSALS, {ollama.show: partial(show_unloaded, host)})
        secrets = (kept_secret(config, one.engine_config) for one in specs) if keys else ()
        secret = next((one for one in secrets if one is not None), None)
        open_paths = page.paths if page is not None else ()
        try:
            app = guarded(door, config, keys, metrics.http, open_paths, secret)
            yield host, app, lambda url: ready(host, url, bool(keys))
        finally:
            await asyncio.shield(host.close())

    return opened


def _check(config: ServerConfig, specs: Sequence[ModelSpec]) -> None:
    """Raise ConfigError for options that are for one model, and for names of two, or of their adapters."""
    if config.replicas != 1 or config.role != "both":
        what = "replicas" if config.replicas != 1 else "role"
        raise ConfigError(f"{what} with several models", "start a server for each model")
    seen: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.config.served_model_name):
            if seen.setdefault(name, spec.name) != spec.name or (
                name == spec.name and _count(specs, name) > 1
            ):
                hint = "name them in `models:` of a --config file"
                raise ConfigError(f"two models have the name {name[:200]!r}", hint)
    for spec in specs:
        for name in spec.adapter_names():
            if (other := seen.setdefault(name, spec.name)) != spec.name:
                words = f"the adapter {name[:200]!r} of model {spec.name!r} has the name of"
                hint = "rename its folder, or give each model an adapter-dir in `models:` of a --config file"
                raise ConfigError(f"{words} model {other!r}, or of an adapter of that", hint)


def _count(specs: Sequence[ModelSpec], name: str) -> int:
    return sum(one.name == name for one in specs)
