"""Ollama's /api/embed, and /api/embeddings, its older form for one text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.frontend import Encoded
from quire.pooled_texts import PooledTexts
from quire.server.event_stream import encode
from quire.server.generation_fields import response_warnings
from quire.server.ollama.protocol import IGNORED
from quire.server.openapi import describes
from quire.server.request import handle_of, read
from quire.server.service import ServiceState
from quire.server.vectors import MAX_INPUTS, PooledFields, vectors_of


class OllamaEmbedFields(Struct, kw_only=True):
    """Fields of both requests. `options` and `keep_alive` change no embedding."""

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbedRequest(OllamaEmbedFields, kw_only=True):
    """The body of /api/embed. Texts that are too long are cut, unless `truncate` is false."""

    input: str | list[str] = []
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaOneEmbeddingRequest(OllamaEmbedFields, kw_only=True):
    """The body of /api/embeddings."""

    prompt: str = ""


class OllamaEmbeddings(Struct, kw_only=True):
    """The response of /api/embed. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
    warnings: list[str] | UnsetType = UNSET


class OllamaOneEmbedding(Struct, kw_only=True):
    """The response of /api/embeddings."""

    embedding: list[float]
    warnings: list[str] | UnsetType = UNSET


@describes("Embed texts, in Ollama's form", OllamaEmbedRequest, OllamaEmbeddings)
async def embed(request: Request) -> Response:
    """Return the embeddings of all inputs."""
    began = time.monotonic_ns()
    asked, unknown, _ = await read(request, OllamaEmbedRequest)
    model = _model(request, asked)
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    cut = asked.truncate is not False
    found, num_tokens = await _embeddings(request, inputs, asked.dimensions, cut)
    reply = OllamaEmbeddings(
        model=model,
        embeddings=found,
        total_duration=time.monotonic_ns() - began,
        prompt_eval_count=num_tokens,
        warnings=_warnings(request, unknown, asked.options),
    )
    return Response(encode(reply), media_type="application/json")


@describes("Embed a text, in Ollama's older form", OllamaOneEmbeddingRequest, OllamaOneEmbedding)
async def embed_one(request: Request) -> Response:
    """Return the embedding of the prompt; without one, none, as when clients have the model loaded."""
    asked, unknown, _ = await read(request, OllamaOneEmbeddingRequest)
    _model(request, asked)
    found, _ = await _embeddings(request, [asked.prompt] if asked.prompt else [], None, cut=True)
    warnings = _warnings(request, unknown, asked.options)
    reply = OllamaOneEmbedding(embedding=found[0] if found else [], warnings=warnings)
    return Response(encode(reply), media_type="application/json")


def _model(request: Request, asked: OllamaEmbedFields) -> str:
    """Return the name of the model for the response. Raises NotFound, also for that of an adapter."""
    service: ServiceState = request.app.state.service
    name, adapter = service.check_name(asked.model)
    return service.check_model(name) if adapter else name


async def _embeddings(
    request: Request, inputs: Sequence[str], dimensions: int | None, cut: bool
) -> tuple[list[list[float]], int]:
    """Embed texts; also return how many tokens they have."""
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"{len(inputs):,} inputs are more than {MAX_INPUTS:,}", None, "input")
    handle = handle_of(request)
    service = handle.service
    texts = PooledTexts(service.frontend)

    def encoded() -> list[Encoded]:
        texts.check_task("embed")
        texts.check_dimensions(dimensions)
        return [texts.encode(text, truncate=-1 if cut else None) for text in inputs]

    prompts = await service.in_thread(encoded)
    if not prompts:
        return [], 0
    vectors, num_tokens = await vectors_of(handle, prompts, PooledFields())
    return await service.in_thread(lambda: [texts.embedding(one, dimensions) for one in vectors]), num_tokens


def _warnings(
    request: Request, unknown: Sequence[str], options: Mapping[str, Any] | None
) -> list[str] | UnsetType:
    given = [name for name in options or {} if name not in IGNORED][:16]
    without = [f"option {name[:64]!r} has no effect on embeddings" for name in given]
    return response_warnings(request, unknown, without) or UNSET


ROUTES = [
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embed_one, methods=["POST"]),
]
