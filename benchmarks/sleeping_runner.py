"""A device that sleeps: each step takes the time that a law says, on a clock and a `sleep` that are given.

The live counterpart of quire.simulation.runner: with `time.monotonic` and `time.sleep` under a real engine it
is a backend whose law is known; with a fake clock it shows that a simulation does what the live engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.step_law import StepLaw
from quire.types import RowResult, Step, StepResult


@dataclass(frozen=True)
class SleepingStep:
    """A step that ends at a known moment."""

    runner: SleepingRunner
    step: Step
    began_s: float
    ended_s: float

    def result(self) -> StepResult:
        """Sleep until the step has ended."""
        while (rest_s := self.ended_s - self.runner.clock()) > 0:
            self.runner.sleep(rest_s)
        rows = tuple(
            RowResult((self.runner.token_id,)) if row.sample else RowResult() for row in self.step.rows
        )
        return StepResult(rows, self.began_s, self.ended_s)


class SleepingRunner:
    """Computes one step after the other, by sleeping. Every row samples the same token."""

    def __init__(
        self, law: StepLaw, clock: Callable[[], float], sleep: Callable[[float], None], token_id: int = 0
    ) -> None:
        self.law, self.clock, self.sleep, self.token_id = law, clock, sleep, token_id
        self._free_s = 0.0

    def launch(self, step: Step) -> SleepingStep:
        """Begin a step when those launched before it have ended."""
        rows = [(row.start, row.count) for row in step.rows]
        num_logits = sum(row.num_logits for row in step.rows)
        began_s = max(self.clock(), self._free_s)
        self._free_s = began_s + self.law.seconds(self.law.values(rows, num_logits))
        return SleepingStep(self, step, began_s, self._free_s)
