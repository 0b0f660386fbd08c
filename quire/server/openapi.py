"""The OpenAPI document, generated from the msgspec Structs that endpoints read and write.

The schema of a stream is that of each of its events (the JSON of one `data:` field, or one line).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
from starlette.routing import BaseRoute, Route

from quire import __version__
from quire.server.errors import ERROR_BODIES, interface_of

REF = "#/components/schemas/{name}"
F = TypeVar("F", bound=Callable[..., Any])


class EndpointDoc(NamedTuple):
    """Summary of an endpoint, and the types of its request, its response and its stream's events.

    Each is None where there is none or it is not JSON. `streams` is a Struct or a union of Structs.
    """

    summary: str
    body: Any = None
    reply: Any = None
    streams: Any = None

    def types(self) -> list[Any]:
        """Return all types that need a schema."""
        return [type_ for type_ in (self.body, self.reply, *self.events()) if type_ is not None]

    def events(self) -> tuple[Any, ...]:
        """Return the types of a stream's events, one by one: msgspec knows no union of untagged Structs."""
        if isinstance(self.streams, UnionType):
            return get_args(self.streams)
        return () if self.streams is None else (self.streams,)


def describes(summary: str, body: Any = None, reply: Any = None, streams: Any = None) -> Callable[[F], F]:
    """Decorate an endpoint with its EndpointDoc."""

    def mark(endpoint: F) -> F:
        endpoint.described = EndpointDoc(summary, body, reply, streams)  # type: ignore[attr-defined]
        return endpoint

    return mark


def document(routes: Iterable[BaseRoute], *, keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of `routes`; `keys` says that requests need an API key."""
    listed = [route for route in routes if isinstance(route, Route) and route.include_in_schema]
    described = [(route, _description(route)) for route in listed]
    types = {type_ for _, doc in described for type_ in doc.types()}
    ordered = [*ERROR_BODIES.values(), *sorted(types, key=str)]
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schema_of = dict(zip(map(str, ordered), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route, doc in described:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, doc, schema_of)
    shown: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        shown["security"] = [{"key": []}]
    return shown


def _description(route: Route) -> EndpointDoc:
    return getattr(route.endpoint, "described", EndpointDoc(route.name))


def _operation(path: str, doc: EndpointDoc, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(type_: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema_of[str(type_)]}}

    interface = interface_of(path)
    good: dict[str, Any] = {"description": "Success"}
    if doc.reply is not None:
        good["content"] = content(doc.reply)
    if events := doc.events():
        media_type = "application/x-ndjson" if interface == "ollama" else "text/event-stream"
        schemas = [schema_of[str(type_)] for type_ in (*events, ERROR_BODIES[interface])]
        good["content"][media_type] = {"schema": {"anyOf": schemas}}
    error = {"description": "Error", "content": content(ERROR_BODIES[interface])}
    operation: dict[str, Any] = {"summary": doc.summary, "responses": {"200": good, "default": error}}
    if doc.body is not None:
        operation["requestBody"] = {"required": True, "content": content(doc.body)}
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
