"""The OpenAPI document, made of the msgspec Structs that endpoints read and write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.routing import BaseRoute, Route

from quire import __version__
from quire.server.errors import interface_of

REF = "#/components/schemas/{name}"
F = TypeVar("F", bound=Callable[..., Any])


class Described(NamedTuple):
    """What an endpoint is for, the types of its body and its reply (None: not JSON, or any), and its form."""

    summary: str
    body: Any = None
    reply: Any = None
    streams: bool = False  # if it is asked to


class ErrorDetail(msgspec.Struct):
    """What is wrong, in words and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of an answer that is an error, where no other interface has its own."""

    error: ErrorDetail


class AnthropicError(msgspec.Struct):
    """What is wrong, in words, and for programs a type; where a client goes by it, a code in `details`."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorBody(msgspec.Struct):
    """The body of an error under /v1/messages; `type` is "error"."""

    type: str
    error: AnthropicError


class OllamaErrorBody(msgspec.Struct):
    """The body of an error under /api/."""

    error: str


class LlamacppError(msgspec.Struct):
    """An error in llama.cpp's shape; `code` is the HTTP status."""

    code: int
    message: str
    type: str


class LlamacppErrorBody(msgspec.Struct):
    """The body of an error of llama.cpp's endpoints."""

    error: LlamacppError


_FAILURES = {
    "openai": ErrorBody,
    "anthropic": AnthropicErrorBody,
    "ollama": OllamaErrorBody,
    "llamacpp": LlamacppErrorBody,
}


def describes(summary: str, body: Any = None, reply: Any = None, streams: bool = False) -> Callable[[F], F]:
    """Decorator of endpoints: what the document says of them."""

    def mark(endpoint: F) -> F:
        endpoint.described = Described(summary, body, reply, streams)  # type: ignore[attr-defined]
        return endpoint

    return mark


def document(routes: Iterable[BaseRoute], *, keys: bool) -> dict[str, Any]:
    """The document. `keys`: whether API keys are asked for."""
    listed = [route for route in routes if isinstance(route, Route) and route.include_in_schema]
    described = [(route, _description(route)) for route in listed]
    types = {type_ for _, words in described for type_ in (words.body, words.reply) if type_ is not None}
    ordered = [*_FAILURES.values(), *sorted(types, key=str)]
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schema_of = dict(zip(map(str, ordered), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route, words in described:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, words, schema_of)
    shown: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        **_plainly_named({"paths": paths, "components": {"schemas": components}}),
    }
    if keys:
        shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        shown["security"] = [{"key": []}]
    return shown


def _plainly_named(shown: dict[str, Any]) -> dict[str, Any]:
    """Types of one name in several modules by that name, before it the interface unless it is OpenAI's."""

    def plain(found: re.Match[bytes]) -> bytes:
        return (found[1].capitalize() if found[1].decode() in _FAILURES.keys() - {"openai"} else b"") + found[
            2
        ]

    written = re.sub(rb"quire\.server\.(\w+)(?:\.\w+)*\.([A-Z]\w*)", plain, msgspec.json.encode(shown))
    renamed: dict[str, Any] = msgspec.json.decode(written)
    return renamed


def _description(route: Route) -> Described:
    return getattr(route.endpoint, "described", Described(route.name))


def _operation(path: str, words: Described, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(type_: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema_of[str(type_)]}}

    interface = interface_of(path)
    good: dict[str, Any] = {"description": "done"}
    if words.reply is not None:
        good["content"] = content(words.reply)
    if words.streams:
        streamed = "application/x-ndjson" if interface == "ollama" else "text/event-stream"
        good["content"][streamed] = {}
    error = {"description": "an error", "content": content(_FAILURES[interface])}
    operation: dict[str, Any] = {"summary": words.summary, "responses": {"200": good, "default": error}}
    if words.body is not None:
        operation["requestBody"] = {"required": True, "content": content(words.body)}
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
