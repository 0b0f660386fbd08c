"""The OpenAPI document of a few routes, and of all of them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server import openapi
from quire.server.openapi import describes


class Question(msgspec.Struct):
    text: str


class Piece(msgspec.Struct):
    text: str


class LastPiece(Piece):
    reason: str


class Pinged(msgspec.Struct, tag="ping"):
    number: int


class Answered(msgspec.Struct, tag="answer"):
    text: str


@describes("Answer a question", Question, LastPiece, streams=Piece | LastPiece)
async def untagged(request: Request) -> Response:
    return Response()


@describes("Answer a question", Question, Answered, streams=Pinged | Answered)
async def tagged(request: Request) -> Response:
    return Response()


@describes("Answer a question", Question, Piece, streams=Piece)
async def single(request: Request) -> Response:
    return Response()


@describes("Answer a question", Question, Piece)
async def whole(request: Request) -> Response:
    return Response()


def contents(path: str, endpoint: Any) -> dict[str, Any]:
    document = openapi.document([Route(path, endpoint, methods=["POST"])], keys=False)
    found: dict[str, Any] = document["paths"][path]["post"]["responses"]["200"]["content"]
    for name in ("Piece", "LastPiece"):
        assert name not in str(found) or name in document["components"]["schemas"]
    return found


def events(path: str, endpoint: Any, media_type: str = "text/event-stream") -> list[str]:
    listed = contents(path, endpoint)[media_type]["schema"]["anyOf"]
    return [one["$ref"].rpartition("/")[2] for one in listed]


def test_the_events_of_a_stream_are_listed_with_the_error_that_may_end_it() -> None:
    assert events("/v1/answer", single) == ["Piece", "ErrorBody"]
    assert events("/v1/answer", untagged) == ["Piece", "LastPiece", "ErrorBody"]
    assert events("/v1/messages", tagged) == ["Pinged", "Answered", "AnthropicErrorBody"]
    assert events("/completion", single) == ["Piece", "LlamacppErrorBody"]


def test_ollama_streams_lines() -> None:
    assert events("/api/chat", single, "application/x-ndjson") == ["Piece", "OllamaErrorBody"]


def test_other_endpoints_do_not_stream() -> None:
    assert contents("/v1/answer", whole).keys() == {"application/json"}
