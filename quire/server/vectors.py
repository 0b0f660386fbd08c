"""The common part of the endpoints for vectors and scores: fields, limits, and the way to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct

from quire.errors import RequestError
from quire.frontend import Encoded
from quire.pooled_texts import PooledTexts, cosine
from quire.sampling_params import MAX_INT32, SamplingParams
from quire.server.request import ServerRequest

MAX_INPUTS = 2048  # texts of one request, as in OpenAI's API
_PARAMS = SamplingParams(detokenize=False, seed=0)


class PooledFields(Struct, kw_only=True):
    """Fields of every request for vectors or scores."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)] | None = None
    user: str | None = None  # without effect, as in OpenAI's API


class Usage(Struct):
    """Tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


def usage_of(num_tokens: int) -> Usage:
    return Usage(num_tokens, num_tokens)


async def vectors_of(
    handle: ServerRequest, prompts: Sequence[Encoded], asked: PooledFields
) -> tuple[list[tuple[float, ...]], int]:
    """Compute the vectors of prompts; also return how many tokens they have."""
    prompts = [replace(prompt, priority=asked.priority or 0) for prompt in prompts]
    await handle.submit(prompts, [_PARAMS] * len(prompts))
    async for _ in handle:
        pass
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return [prompt.output.vector for prompt in handle.prompts], num_tokens


async def scores_of(
    handle: ServerRequest,
    pairs: Sequence[tuple[str, str]],
    asked: PooledFields,
    instruction: str | None,
    activate: bool,
) -> tuple[list[float], int]:
    """Compute the scores of pairs of texts; also return how many tokens were read.

    An embedding model gives the cosines of embeddings; a text that several pairs have is embedded once.
    """
    service, texts = handle.service, PooledTexts(handle.service.frontend)
    limit = asked.truncate_prompt_tokens
    if texts.pooling.task == "score":

        def encoded() -> list[Encoded]:
            return [texts.encode_pair(*pair, instruction=instruction, truncate=limit) for pair in pairs]

        vectors, num_tokens = await vectors_of(handle, await service.in_thread(encoded), asked)
        return [texts.score(vector, activate=activate) for vector in vectors], num_tokens
    if instruction is not None:
        problem = "an embedding model reads no instruction"
        raise RequestError(problem, "include it in the query, or leave it out", "instruction")
    distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = await service.in_thread(lambda: [texts.encode(text, truncate=limit) for text in distinct])
    vectors, num_tokens = await vectors_of(handle, prompts, asked)
    found = dict(zip(distinct, vectors, strict=True))
    return await service.in_thread(lambda: [cosine(found[a], found[b]) for a, b in pairs]), num_tokens
