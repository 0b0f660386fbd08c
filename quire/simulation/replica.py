"""One simulated replica: the live scheduler and engine loop, on a clock of its own."""

from __future__ import annotations

from typing import Literal

from quire.engine.engine import Engine, step
from quire.engine.scheduler import Scheduler
from quire.engine.status import StepReport
from quire.engine.step_law import StepLaw
from quire.simulation.clock import VirtualClock
from quire.simulation.runner import VirtualRunner
from quire.types import NewRequest, Output

State = Literal["starting", "ready", "draining", "gone"]


class Replica:
    """An engine among several, from its start until it is gone.

    A step is computed at once when it begins. Then the replica's clock is ahead of the others', and what the
    step gave is kept until the fleet has reached its end.
    """

    engine: Engine  # from when it is ready, as the next two
    clock: VirtualClock
    runner: VirtualRunner

    def __init__(self, started_s: float) -> None:
        self.state: State = "starting"
        self.started_s = started_s
        self.ready_s = self.gone_s = float("inf")
        self.has_died = False
        self.number = -1  # of the router's
        self.is_busy = False  # a step is in progress
        self.link_free_s = 0.0  # when it has sent, or received, all blocks of prompts
        self.open: dict[str, NewRequest] = {}
        self.unstarted: set[str] = set()  # those without an output of this replica
        self.num_steps = 0
        self._given: tuple[list[Output], StepReport | None] = [], None

    def get_ready(self, scheduler: Scheduler, law: StepLaw, now_s: float, num_records: int) -> None:
        """Start the engine."""
        self.ready_s = now_s
        self.clock = VirtualClock()
        self.clock.advance_to(now_s)
        self.runner = VirtualRunner(law, self.clock)
        self.engine = Engine(scheduler, self.runner, clock=self.clock.read, num_records=num_records)

    def add(self, new: NewRequest) -> None:
        """Add a request: the next step may begin to compute it. Raises RequestError."""
        self.engine.add(new)
        self.open[new.request_id] = new
        self.unstarted.add(new.request_id)

    def begin_step(self, now_s: float) -> float | None:
        """Begin a step; return the time of its end, or None if there is no work."""
        engine, clock = self.engine, self.clock
        if not engine.has_work:
            return None
        clock.advance_to(now_s)
        self._given = step(engine)
        self.num_steps += 1
        return clock.now_s

    def end_step(self) -> tuple[list[Output], StepReport | None]:
        """Return what the step in progress gave."""
        given, self._given = self._given, ([], None)
        return given
