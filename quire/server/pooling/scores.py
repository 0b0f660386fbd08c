"""/score as vLLM has it, and /rerank as Cohere, Jina and vLLM do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.pooled_texts import pairs_of
from quire.server.event_stream import encode
from quire.server.generation_fields import response_warnings
from quire.server.openapi import describes
from quire.server.request import handle_of, read
from quire.server.vectors import MAX_INPUTS, PooledFields, Usage, scores_of, usage_of

Texts = str | list[str]


class ScoreFields(PooledFields, kw_only=True):
    """Fields of requests for scores: `instruction` is for models that read one with each pair."""

    instruction: str | None = None
    use_activation: bool | None = None


class ScoreRequest(ScoreFields, kw_only=True):
    """Body of a request: one text and several, or as many on both sides, under any of three names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class Score(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct):
    """Body of the response, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"
    warnings: list[str] | UnsetType = UNSET


class Document(Struct):
    """A document that is to be ranked."""

    text: str


class RerankRequest(ScoreFields, kw_only=True):
    """Body of a request: a query, and documents to be ranked by how well they meet it."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class Ranked(Struct, omit_defaults=True):
    """A document with its place in the request and its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Struct):
    """Body of the response: the best document first; of equal ones the first in the request."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    warnings: list[str] | UnsetType = UNSET


@describes("Score pairs of texts", ScoreRequest, Scores)
async def score(request: Request) -> Response:
    """Return the scores of all pairs."""
    handle = handle_of(request)
    asked, unknown, _ = await read(request, ScoreRequest)
    model = handle.service.check_model(asked.model)
    pairs = _pairs(asked)
    activate = asked.use_activation is not False
    found, num_tokens = await scores_of(handle, pairs, asked, asked.instruction, activate)
    data = [Score(index, value) for index, value in enumerate(found)]
    name, now, warnings = f"score-{token_hex(12)}", int(time.time()), response_warnings(request, unknown)
    response = Scores(name, now, model, data, usage_of(num_tokens), warnings=warnings or UNSET)
    return Response(encode(response), media_type="application/json")


@describes("Rank documents by a query", RerankRequest, Ranking)
async def rerank(request: Request) -> Response:
    """Return the documents that meet the query best."""
    handle = handle_of(request)
    asked, unknown, _ = await read(request, RerankRequest)
    model = handle.service.check_model(asked.model)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    _check_count(texts, "documents")
    if asked.top_n is not None and asked.top_n < 0:
        raise RequestError(f"top_n = {asked.top_n} is less than 0", None, "top_n")
    activate = asked.use_activation is not False
    pairs = [(asked.query, text) for text in texts]
    found, num_tokens = await scores_of(handle, pairs, asked, asked.instruction, activate)
    best = sorted(range(len(found)), key=lambda index: -found[index])[: asked.top_n or len(found)]
    shown = asked.return_documents is not False
    results = [Ranked(index, found[index], Document(texts[index]) if shown else None) for index in best]
    name, warnings = f"rerank-{token_hex(12)}", response_warnings(request, unknown)
    response = Ranking(name, model, results, usage_of(num_tokens), warnings or UNSET)
    return Response(encode(response), media_type="application/json")


def _pairs(asked: ScoreRequest) -> list[tuple[str, str]]:
    """Return the pairs of a request, which gives both sides under one pair of names."""
    named = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
    given = [(one, other) for one, other in named if getattr(asked, one) is not None]
    if len(given) != 1:
        raise RequestError("a request for scores has text_1 and text_2", None, "text_1")
    one, other = (getattr(asked, name) for name in given[0])
    if other is None:
        raise RequestError(f"{given[0][1]} is missing", None, given[0][1])
    for texts, name in ((one, given[0][0]), (other, given[0][1])):
        _check_count(texts, name)
    return pairs_of(one, other)


def _check_count(texts: str | Sequence[str], name: str) -> None:
    if isinstance(texts, str):
        return
    if not texts:
        raise RequestError(f"{name} is an empty list", "give at least one text", name)
    if len(texts) > MAX_INPUTS:
        raise RequestError(f"{len(texts):,} texts are more than {MAX_INPUTS:,}", None, name)


ROUTES = [
    *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
