"""The endpoint of recent steps: what bound each, and the ceilings they are judged by."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.status import NUM_RECORDS
from quire.errors import RequestError
from quire.roofline.verdicts import by_bound, is_stale
from quire.server.admin import reply, service_of
from quire.server.errors import NotFound
from quire.server.openapi import describes
from quire.simulation.law_file import KnownLaw, as_json
from quire.types import Record

DEFAULT_LAST = 100


class BoundTotal(msgspec.Struct):
    """The listed steps with one bound. `seconds` are measured from the end of the step before each."""

    bound: str
    steps: int
    seconds: float
    device_s: float
    predicted_s: float
    roof_share: float


class Steps(msgspec.Struct):
    """The last steps, the oldest first, and sums of them.

    `ceilings` are rates of this machine, `ceilings_age_s` the time since they were measured; both are null if
    they were not. `ceiling_stale`: a step was faster than they allow, so they were measured on a busier
    machine or on another one.
    """

    ceilings: dict[str, float] | None
    ceilings_age_s: float | None
    ceiling_stale: bool
    bounds: list[BoundTotal]
    steps: list[Record]


@describes("List the last steps with what bound each, and the ceilings of this machine", reply=Steps)
async def steps(request: Request) -> Response:
    """List `last` steps. They contain numbers, and nothing of any request."""
    status = service_of(request).engine.status
    last = _last(request.query_params.get("last"))
    records = list(itertools.islice(status.records, max(0, len(status.records) - last), None))
    found = dict(status.facts.ceilings or {})
    measured_at = found.pop("measured_at", None)
    totals = [
        BoundTotal(one.bound, one.num_steps, one.seconds, one.device_s, one.predicted_s, one.roof_share)
        for one in by_bound(records)
    ]
    return reply(
        Steps(
            ceilings=found or None,
            ceilings_age_s=None if measured_at is None else time.time() - measured_at,
            ceiling_stale=any(is_stale(one.roof_share) for one in records),
            bounds=totals,
            steps=records,
        )
    )


class LawFile(msgspec.Struct):
    """The law of the time of steps in the form of a file for `quire simulate --law`."""

    quire_law: int
    source: str
    delays: dict[str, float]
    law: dict[str, Any]


@describes("Return the law of the time of steps, for `quire simulate --law`", reply=LawFile)
async def law(request: Request) -> Response:
    """Return the law as calibrated on the steps so far; the delays of clients are not known here."""
    service = service_of(request)
    found = service.engine.status.law
    if found is None:
        hint = "it is known once steps have ended, on a machine whose ceilings were measured"
        raise NotFound("no law of the time of steps is known yet", hint)
    source = f"calibrated by the server of {service.names[0]} on its own steps, without clients"
    return reply(LawFile(**as_json(KnownLaw(found, source=source))))


def _last(asked: str | None) -> int:
    if asked is None:
        return DEFAULT_LAST
    if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
        raise RequestError(f"last must be a number from 0 to {NUM_RECORDS:,}", None, "last")
    return min(int(asked), NUM_RECORDS)


ROUTES = [Route("/steps", steps), Route("/steps/law", law)]
