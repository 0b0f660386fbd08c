"""Simulate a load: the live scheduler and engine loop, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.simulation.clients import NO_BOUNDS, NO_DELAYS, Bounds, Clients, Delays
from quire.simulation.fleet import Fleet, FleetPlan
from quire.step_record import Record


@dataclass(frozen=True, slots=True)
class Simulated:
    """The outcome of a simulation. Times are of the virtual clock, in seconds from the start of the load.

    `records` are those of the last steps. `busy_s` is the time that the device computed.
    """

    timelines: list[Timeline]
    records: deque[Record]
    end_s: float
    busy_s: float
    num_steps: int
    num_preemptions: int


def simulate(
    scheduler: Scheduler,
    law: StepLaw,
    requests: Iterable[Request],
    *,
    delays: Delays = NO_DELAYS,
    bounds: Bounds = NO_BOUNDS,
    is_open: bool = True,
    num_first: int | None = None,
    num_records: int = 4096,
) -> Simulated:
    """Run a load through a fresh scheduler until all its requests have ended, or the first `num_first`.

    Prompts are token ids, and every request gets all the tokens it asks for. Steps take the time of `law`,
    whatever law the scheduler itself plans by (`Scheduler.calibrate`).
    """
    clients = Clients(requests, delays, bounds, is_open=is_open)
    fleet = Fleet(FleetPlan(num_records=num_records), clients, lambda: scheduler, law)
    fleet.run(num_first)
    (replica,) = fleet.replicas
    end_s = max((one.end_s for one in clients.timelines), default=0.0)
    return Simulated(
        clients.timelines,
        replica.engine.records,
        end_s,
        replica.runner.busy_s,
        replica.num_steps,
        scheduler.num_preemptions,
    )
