"""The door to several models: it reads which one a request is for, and passes the request to its routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import Overloaded, QuireError, RequestError
from quire.server.body import LARGE_BYTES, MAX_BODY_BYTES, malformed, too_large
from quire.server.errors import response_for
from quire.server.hosted.host import Host, HostedModel
from quire.server.request import MAX_UPLOADS_BYTES, SAFE_METHODS
from quire.server.service import DRAIN_RETRY_S, QueueFull

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_S, FOREVER_S = 1e12, float("inf")


class Asked(msgspec.Struct):
    """Fields of a body about the model: its name, in Ollama's form also `name`, and how long it is kept."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None


_ASKED = msgspec.json.Decoder(Asked)
Answer = Callable[[HostedModel, str], Awaitable[Response]]  # of the name that a request gives


class Door:
    """ASGI application of several models. `own` are the routes about all of them, `passed` those under the
    paths of `own` that are for one model nevertheless. `every` has all routes, also those of models: it
    answers what none of them is for.

    A request with a body is for the model that its `model` names, or else its query, which is loaded for it
    unless its endpoint is in `unloaded`, which answers for a model that is not; one without a body for the
    loaded model that its query names, by default the one used last.
    """

    def __init__(
        self,
        host: Host,
        own: ASGIApp,
        routes: Sequence[Route],
        passed: Sequence[Route],
        every: Starlette,
        refusals: Sequence[Any] = (),
        unloaded: Mapping[Any, Answer] = MappingProxyType({}),
    ) -> None:
        self._host = host
        self._own = own
        self._every = every
        self._routes = routes
        self._passed = passed
        self._refusals = refusals
        self._unloaded = unloaded
        self._num_bytes = 0  # of bodies that arrive, or wait for their model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (_match(self._routes, scope) and not _match(self._passed, scope)):
            await self._own(scope, receive, send)
            return
        route = next((one for one in self._every.routes if one.matches(scope)[0] is Match.FULL), None)
        if not isinstance(route, Route) or route.endpoint in self._refusals:
            await self._every(scope, receive, send)  # a model is not loaded for that
            return
        try:
            if scope["method"] in SAFE_METHODS:
                app = self._loaded(scope)
            else:
                await self._pass_in(scope, receive, send, route)
                return
        except QuireError as error:
            scope["state"]["shed"] = isinstance(error, QueueFull)
            scope.update(route.matches(scope)[1])  # for the log and the metrics
            await response_for(error, scope["path"])(scope, receive, send)
            return
        await app(scope, receive, send)

    def _loaded(self, scope: Scope) -> ASGIApp:
        """Return the routes of a loaded model. Raises Overloaded if it is not."""
        name = _queried(scope)
        model = self._host.last_used() if name is None else self._host.find(name)
        if model is None or model.app is None:
            words = "no model is loaded" if model is None else f"model {model.name!r} is {model.state}"
            raise Overloaded(words, "send a request to the model, which loads it", DRAIN_RETRY_S)
        return model.app

    async def _pass_in(self, scope: Scope, receive: Receive, send: Send, route: Route) -> None:
        """Pass on a request when its model is loaded, or without it. Raises QuireError before that."""
        if self._host.refusing:
            raise Overloaded("the server is shutting down", "ask again", DRAIN_RETRY_S)
        with self._counted() as count:
            body = await _read(receive, count)
            if body is None:
                return
            asked = await _asked(body)
            name = _name(asked)
            keep_s = _seconds(asked.keep_alive) if scope["path"].startswith("/api/") else None
            model = self._host.find(_queried(scope) if name is None else name)
            if model.app is None and (unloaded := self._unloaded.get(route.endpoint)) is not None:
                answer = await unloaded(model, name or model.name)
                scope.update(route.matches(scope)[1])  # for the log and the metrics
                await answer(scope, receive, send)
                return
            left = asyncio.ensure_future(_until_left(receive))
            try:
                await self._host.enter(model, left)
            except BaseException:
                left.cancel()
                raise
        replayed = _replay(body, left)
        del body  # it is read once, and the answer may take long
        try:
            if model.app is None:  # it was given up since the request was let in
                raise Overloaded(f"model {model.name!r} is {model.state}", "ask again", DRAIN_RETRY_S)
            if not left.done():
                await model.app(scope, replayed, send)
        finally:
            left.cancel()
            self._host.leave(model, keep_s)

    @contextmanager
    def _counted(self) -> Iterator[Any]:
        """Bound the bodies that arrive or wait; yield the function that counts bytes of one."""
        own_bytes = 0

        def count(num_bytes: int) -> None:
            nonlocal own_bytes
            own_bytes += num_bytes
            self._num_bytes += num_bytes
            if own_bytes > MAX_BODY_BYTES:
                raise too_large()
            if self._num_bytes > MAX_UPLOADS_BYTES:
                raise Overloaded("too many large requests are being uploaded")

        try:
            yield count
        finally:
            self._num_bytes -= own_bytes


def _match(routes: Sequence[Route], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


async def _read(receive: Receive, count: Any) -> bytes | None:
    """Return the whole body, or None if the client has left before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        count(len(pieces[-1]))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _until_left(receive: Receive) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


def _replay(body: bytes, left: asyncio.Future[Message]) -> Receive:
    """Return a `receive` that gives the body, and then waits until the client leaves."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.shield(left)

    return receive


async def _asked(body: bytes) -> Asked:
    """Read the fields about the model and pass over others. Raises RequestError unless it is JSON."""
    if not body.strip():
        return Asked()
    decode = asyncio.to_thread(_decode, body) if len(body) >= LARGE_BYTES else None
    return _decode(body) if decode is None else await decode


def _decode(body: bytes) -> Asked:
    try:
        return _ASKED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise malformed(body, error) from None


def _queried(scope: Scope) -> str | None:
    name: str | None = QueryParams(scope["query_string"]).get("model")
    return name


def _name(asked: Asked) -> str | None:
    name = asked.name if asked.model is None else asked.model
    if name is not None and not isinstance(name, str):
        raise RequestError("model must be text", None, "model")
    return name


def _seconds(keep_alive: Any) -> float | None:
    """Return Ollama's keep_alive in seconds: a number, or durations such as "1h30m"; negative: for ever."""
    if keep_alive is None or isinstance(keep_alive, bool):
        return None
    if isinstance(keep_alive, int | float):
        return float(keep_alive) if 0 <= keep_alive < LONGEST_S else FOREVER_S
    text = str(keep_alive).strip()
    if text.startswith("-"):
        return FOREVER_S
    if re.fullmatch(r"\d{1,12}", text):
        return float(text)
    parts = _PART.findall(text[:64])
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts) if parts else None
