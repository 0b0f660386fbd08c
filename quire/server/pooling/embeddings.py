"""/v1/embeddings, as OpenAI has it."""

from __future__ import annotations

import struct
import time
from base64 import b64encode
from collections.abc import Sequence
from secrets import token_hex
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.frontend import Encoded
from quire.pooled_texts import PooledTexts
from quire.server.event_stream import encode
from quire.server.generation_fields import response_warnings
from quire.server.openapi import describes
from quire.server.request import handle_of, read
from quire.server.vectors import MAX_INPUTS, PooledFields, Usage, usage_of, vectors_of


class EmbeddingRequest(PooledFields, kw_only=True):
    """Body of a request: texts, or token ids, and the form in which their embeddings are returned."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None  # of the model's own prompts


class Embedding(Struct):
    """The embedding of one input, as numbers or as little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(Struct):
    """Body of the response, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: Literal["list"] = "list"
    warnings: list[str] | UnsetType = UNSET


@describes("Embed texts", EmbeddingRequest, Embeddings)
async def embeddings(request: Request) -> Response:
    """Return the embeddings of all inputs."""
    handle = handle_of(request)
    service = handle.service
    asked, unknown, _ = await read(request, EmbeddingRequest)
    model = service.check_model(asked.model)
    texts = PooledTexts(service.frontend)
    prompts = await service.in_thread(_encode, texts, asked)
    vectors, num_tokens = await vectors_of(handle, prompts, asked)
    warnings = response_warnings(request, unknown)

    def response() -> bytes:
        data = [Embedding(i, _shown(texts, asked, vector)) for i, vector in enumerate(vectors)]
        head: dict[str, Any] = {"id": f"embd-{token_hex(12)}", "created": int(time.time()), "model": model}
        return encode(Embeddings(**head, data=data, usage=usage_of(num_tokens), warnings=warnings or UNSET))

    return Response(await service.in_thread(response), media_type="application/json")


def _encode(texts: PooledTexts, asked: EmbeddingRequest) -> list[Encoded]:
    inputs = _inputs(asked.input)
    texts.check_task("embed")
    texts.check_dimensions(asked.dimensions)
    how: dict[str, Any] = {"prompt_name": asked.prompt_name, "truncate": asked.truncate_prompt_tokens}
    return [texts.encode(one, **how) for one in inputs]


def _inputs(given: str | Sequence[str | int | list[int]]) -> list[Any]:
    """Return the inputs as a list. Raises RequestError when there are none, too many, or of mixed kinds."""
    if isinstance(given, str) or (given and all(isinstance(one, int) for one in given)):
        return [given]
    if not given:
        raise RequestError("input is an empty list", "give at least one text", "input")
    if len(given) > MAX_INPUTS:
        raise RequestError(f"{len(given):,} inputs are more than {MAX_INPUTS:,}", None, "input")
    if any(isinstance(one, int) for one in given):
        raise RequestError("input mixes token ids and other inputs", None, "input")
    return list(given)


def _shown(texts: PooledTexts, asked: EmbeddingRequest, vector: Sequence[float]) -> list[float] | str:
    numbers = texts.embedding(vector, asked.dimensions)
    if asked.encoding_format != "base64":
        return numbers
    return b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


ROUTES = [Route("/v1/embeddings", embeddings, methods=["POST"])]
