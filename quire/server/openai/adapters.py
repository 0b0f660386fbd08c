"""Endpoints that load and unload adapters, in vLLM's shapes. They are off unless --load-adapters is given."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError
from quire.server.adapter_changes import ChangesAdapters
from quire.server.errors import NotFound
from quire.server.openapi import describes
from quire.server.request import read
from quire.server.service import ServiceState


class LoadAdapterRequest(msgspec.Struct):
    """An adapter to be loaded under a name, from a folder in --adapter-dir, absolute or relative to that."""

    lora_name: str
    lora_path: str
    model: str | None = None  # of a server with several, by default the first


class UnloadAdapterRequest(msgspec.Struct):
    """An adapter to be unloaded. Requests that have it keep it until they end."""

    lora_name: str
    model: str | None = None


def check(engine_config: EngineConfig, keyed: bool) -> None:
    """Raise ConfigError for a server that must not change its adapters."""
    if engine_config.adapter_dir is None:
        raise ConfigError(
            "load_adapters without adapter_dir", "name the folder that adapters are loaded from"
        )
    if not keyed:
        raise ConfigError("load_adapters without an API key", "set QUIRE_API_KEY, or give --api-key-file")


@describes("Load an adapter from the folder of adapters", LoadAdapterRequest)
async def load(request: Request) -> Response:
    """Load an adapter; streams of other requests go on meanwhile."""
    service: ServiceState = request.app.state.service
    asked, *_ = await read(request, LoadAdapterRequest, queued=False)
    service.check_name(asked.model)
    if asked.lora_name in (*service.names, *service.names_elsewhere()):
        problem = f"{asked.lora_name[:200]!r} is the name of a model, or of an adapter of another model"
        raise RequestError(problem, "give another one", "lora_name")
    await changing(service).change_adapter(asked.lora_name, asked.lora_path)
    return Response(f"Success: LoRA adapter '{asked.lora_name}' added successfully.", media_type="text/plain")


@describes("Unload an adapter", UnloadAdapterRequest)
async def unload(request: Request) -> Response:
    """Unload an adapter: new requests for it are refused."""
    service: ServiceState = request.app.state.service
    asked, *_ = await read(request, UnloadAdapterRequest, queued=False)
    service.check_name(asked.model)
    if asked.lora_name not in service.adapters:
        problem = f"the adapter {asked.lora_name[:200]!r} is not loaded"
        raise NotFound(problem, "/v1/models lists all", "lora_name", "model_not_found")
    await changing(service).change_adapter(asked.lora_name, None)
    return Response(
        f"Success: LoRA adapter '{asked.lora_name}' removed successfully.", media_type="text/plain"
    )


def changing(service: ServiceState) -> ChangesAdapters:
    """Return the engine that changes its adapters. Raises ConfigError with a role, and on Ray."""
    if not isinstance(service.engine, ChangesAdapters) or service.config.role != "both":
        hint = "leave it out: the adapters in adapter_dir are served, and others after a new start"
        raise ConfigError("load_adapters with a role, or on Ray: adapters do not change there", hint)
    return service.engine


ROUTES = (
    Route("/v1/load_lora_adapter", load, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
)
