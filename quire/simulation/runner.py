"""The simulated device: steps that compute nothing and take the time that a law says."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.step_law import StepLaw
from quire.simulation.clock import VirtualClock
from quire.types import RowResult, Step, StepResult

TOKEN_ID = 0  # what every row samples
_SAMPLED, _NOTHING = RowResult((TOKEN_ID,)), RowResult()


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """A launched step. Waiting for its result lets time pass until the device has ended it."""

    clock: VirtualClock
    answer: StepResult

    def result(self) -> StepResult:
        """Return what the device would answer, but for the values of tokens."""
        self.clock.advance_to(self.answer.ended_s)
        return self.answer


class VirtualRunner:
    """A StepRunner without a model.

    The host takes `law.host_s` to plan and launch a step; the device computes steps one after the other. So
    with two steps in flight the host's time passes while the device computes, and with one beside it.
    """

    def __init__(self, law: StepLaw, clock: VirtualClock) -> None:
        self.law = law
        self.busy_s = 0.0  # of the device, since the start
        self._clock = clock
        self._free_s = 0.0  # when the device ends the last step that was launched

    def launch(self, step: Step) -> VirtualStep:
        """Begin a step as soon as the device is free."""
        law, clock = self.law, self._clock
        clock.advance_to(clock.now_s + law.host_s)
        began_s = max(clock.now_s, self._free_s)
        rows = [(row.start, row.count) for row in step.rows]
        num_logits = sum([row.num_logits for row in step.rows])
        seconds = law.seconds(law.values(rows, num_logits))
        self.busy_s += seconds
        self._free_s = began_s + seconds
        results = tuple([_SAMPLED if row.sample else _NOTHING for row in step.rows])
        return VirtualStep(clock, StepResult(results, began_s, self._free_s))
