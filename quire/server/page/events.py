"""The endpoint of the feed: lines of JSON, for as long as the viewer stays."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.server.admin import service_of
from quire.server.errors import ErrorBody, NotFound
from quire.server.event_stream import EventStream
from quire.server.page.experiments import may_start
from quire.server.page.parts import encode

MEDIA_TYPE = "application/x-ndjson"


class FrameStream(EventStream):
    """A stream of frames, which ends when the viewer leaves."""

    media_type = MEDIA_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.create_task(super().__call__(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((stream, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not stream.done():
                stream.cancel()
                await asyncio.wait((stream,))
        if not stream.cancelled():
            stream.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(request: Request) -> Response:
    """Return the frames of the feed (docs/serving.md)."""
    service = service_of(request)
    if service.feed is None:
        raise NotFound("the events of the engine are not served", None)
    if request.method == "HEAD":
        return Response(media_type=MEDIA_TYPE)
    frames = service.feed.frames(may_start(request.scope, service))
    return FrameStream(frames, lambda error: encode(ErrorBody.of(error)) + b"\n", b"", b"")


# Not in the OpenAPI document: programs that try all in it would wait forever.
ROUTES = [Route("/page/events", events, include_in_schema=False)]
