"""The endpoint of recent steps: what bound each, and the ceilings they are judged by."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.status import NUM_RECORDS, Facts
from quire.errors import RequestError
from quire.roofline.verdicts import by_bound, is_stale
from quire.server.admin import reply, service_of
from quire.server.errors import NotFound
from quire.server.openapi import describes
from quire.server.service import ServiceState
from quire.simulation.law_file import KnownLaw, as_json
from quire.step_record import Record

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
    machine or on another one. `replica` is whose steps they are, where there are several.
    """

    ceilings: dict[str, float] | None
    ceilings_age_s: float | None
    ceiling_stale: bool
    bounds: list[BoundTotal]
    steps: list[Record]
    replica: int | UnsetType = UNSET


@describes("List the last steps with what bound each, and the ceilings of this machine", reply=Steps)
async def steps(request: Request) -> Response:
    """List `last` steps, of one replica where there are several (`replica`, by default the first).

    They contain numbers, and nothing of any request.
    """
    service, asked = service_of(request), request.query_params
    number = _replica_of(service, asked.get("replica"))
    status = service.engine.statuses.get(number, service.first_status)
    last = last_of(asked.get("last"), NUM_RECORDS)
    records = list(itertools.islice(status.records, max(0, len(status.records) - last), None))
    ceilings, age_s = ceilings_of(status.facts)
    totals = [
        BoundTotal(one.bound, one.num_steps, one.seconds, one.device_s, one.predicted_s, one.roof_share)
        for one in by_bound(records)
    ]
    return reply(
        Steps(
            ceilings=ceilings,
            ceilings_age_s=age_s,
            ceiling_stale=any(is_stale(one.roof_share) for one in records),
            bounds=totals,
            steps=records,
            replica=number if service.replicas is not None else UNSET,
        )
    )


def ceilings_of(facts: Facts) -> tuple[dict[str, float] | None, float | None]:
    """Return the ceilings, and the seconds since they were measured."""
    found = dict(facts.ceilings or {})
    measured_at = found.pop("measured_at", None)
    return found or None, None if measured_at is None else time.time() - measured_at


class LawFile(msgspec.Struct):
    """The law of the time of steps in the form of a file for `quire simulate --law`.

    `cost` is what a step computes, reads and writes: coefficients by the law's features.
    """

    quire_law: int
    source: str
    delays: dict[str, float]
    law: dict[str, Any]
    cost: dict[str, tuple[float, ...]] | None


@describes("Return the law of the time of steps, for `quire simulate --law`", reply=LawFile)
async def law(request: Request) -> Response:
    """Return the law as calibrated on the steps so far, at first the one assumed for the ceilings.

    The delays of clients are not known here.
    """
    found = law_of(service_of(request))
    if found is None:
        hint = "it needs the ceilings of this machine: quire probe"
        raise NotFound("no law of the time of steps is known", hint)
    return reply(found)


def law_of(service: ServiceState) -> LawFile | None:
    """Return the law as calibrated on the steps so far, or as assumed, if there is one."""
    status = service.first_status
    law, costs = status.law or status.facts.law, status.facts.costs
    if law is None:
        return None
    source = f"assumed for the ceilings of the machine of {service.names[0]}"
    if status.law is not None:
        source = f"calibrated by the server of {service.names[0]} on its own steps, without clients"
    cost = costs._asdict() if costs is not None and costs.features == law.features else None
    if cost is not None:
        del cost["features"]
    return LawFile(**as_json(KnownLaw(law, source=source)), cost=cost)


def last_of(asked: str | None, most: int) -> int:
    """Read how many of the last entries are asked for. Raises RequestError if it is no number."""
    if asked is None:
        return DEFAULT_LAST
    if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
        raise RequestError(f"last must be a number from 0 to {most:,}", None, "last")
    return min(int(asked), most)


def _replica_of(service: ServiceState, asked: str | None) -> int:
    """Read which replica is asked for, by default the first. Raises RequestError if it does not run."""
    numbers = {str(number): number for number in service.engine.statuses}
    if asked is None:
        return service.first
    if asked not in numbers:
        raise RequestError(f"replica must be one of {', '.join(numbers)}", None, "replica")
    return numbers[asked]


ROUTES = [Route("/steps", steps), Route("/steps/law", law)]
