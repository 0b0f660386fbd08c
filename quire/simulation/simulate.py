"""Simulate a load: the live scheduler and engine loop, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.errors import RequestError
from quire.simulation.clients import NO_BOUNDS, NO_DELAYS, Bounds, Clients, Delays
from quire.simulation.clock import VirtualClock
from quire.simulation.runner import VirtualRunner
from quire.types import Record


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
    clock = VirtualClock()
    runner = VirtualRunner(law, clock)
    engine = Engine(scheduler, runner, clock=clock.read, num_records=num_records)
    clients = Clients(requests, delays, bounds, is_open=is_open)
    num_steps = 0
    while num_first is None or not _ended(clients.timelines, num_first):
        _send_due(clients, engine, clock)
        if engine.has_work:
            clients.receive(engine.step(), clock.now_s)
            num_steps += 1
        elif (next_s := clients.next_s) is not None:
            clock.advance_to(next_s)
        else:
            break
    timelines = clients.timelines
    end_s = max((one.end_s for one in timelines), default=0.0)
    return Simulated(timelines, engine.records, end_s, runner.busy_s, num_steps, scheduler.num_preemptions)


def _ended(timelines: list[Timeline], num_first: int) -> bool:
    return len(timelines) >= num_first and all(one.end_s for one in timelines[:num_first])


def _send_due(clients: Clients, engine: Engine, clock: VirtualClock) -> None:
    """Give the engine all requests that have reached it by now."""
    while (next_s := clients.next_s) is not None and next_s <= clock.now_s:
        new = clients.take()
        if not clients.queue(new):
            continue
        try:
            engine.add(new)
        except RequestError as error:
            clients.refuse(new, error)
