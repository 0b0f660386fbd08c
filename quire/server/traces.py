"""The endpoint of traces: the last seconds of the engine, for ui.perfetto.dev."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import ConfigError, RequestError
from quire.goals import duration_ms
from quire.server.admin import service_of
from quire.server.errors import NotFound
from quire.server.openapi import describes

DEFAULT_LAST, MAX_LAST_S = "30s", 3600.0
MEDIA_TYPE = "application/vnd.google.protobuf"


@describes("Return a trace of the last seconds (last=30s) for Perfetto, see --record")
async def trace(request: Request) -> Response:
    """Return what was recorded of the last seconds as a Perfetto trace, without contents."""
    recorder = service_of(request).recorder
    if recorder is None:
        raise NotFound("nothing is recorded", "start the server with --record DIR")
    try:
        last_s = duration_ms(request.query_params.get("last", DEFAULT_LAST)) / 1e3
    except ConfigError as error:
        raise RequestError(error.message, error.hint, "last") from None
    if last_s > MAX_LAST_S:
        raise RequestError("last is longer than an hour", "ask for a shorter time", "last")
    name = "quire.pftrace"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(await recorder.trace(last_s), media_type=MEDIA_TYPE, headers=headers)


ROUTES = [Route("/trace", trace)]
