"""StepLaw: the predicted time of a step, in plain numbers that a recording can keep.

Calibration (quire.roofline) makes it from the folded costs of a program, the ceilings of the machine and the
records of steps, and gives it to the scheduler with `Scheduler.calibrate`, like any other recorded call. So
plans that depend on predicted times remain a pure function of the calls.
"""

from __future__ import annotations

from operator import mul
from typing import Literal, NamedTuple

from quire.program.features import Feature, Rows, plus, values

Limit = Literal["memory", "cache", "int8", "bf16", "f32"]
Place = Literal["memory", "cache"]


class Stage(NamedTuple):
    """A part of a step that is bound by memory or by arithmetic: seconds of each, by feature.

    `place` is where it reads: memory, or a cache that holds all it reads. `kind` is the data type of most of
    its arithmetic.
    """

    memory: tuple[float, ...]
    arithmetic: tuple[float, ...]
    name: str = ""
    place: Place = "memory"
    kind: Literal["int8", "bf16", "f32"] = "f32"


class StepLaw(NamedTuple):
    """The time of a step: the sum over `stages` of the longer of memory and arithmetic, and `overhead`.

    All coefficients are seconds by feature; `features` begin with LEADING (quire.program.features). `roof`
    are the stages at the measured ceilings, without overhead: what no implementation could beat. `host_s` is
    the mean time between two steps. `tail` is the 99th percentile of measured over predicted times, both from
    the end of one step to that of the next; 0 until it is known, and no goal is kept by the law until then.
    `drafting_s` is how much longer the device waits for a step before which drafts were looked for.
    """

    features: tuple[Feature, ...]
    stages: tuple[Stage, ...]
    overhead: tuple[float, ...]
    roof: tuple[Stage, ...]
    host_s: float = 0.0
    tail: float = 0.0
    drafting_s: float = 0.0

    def values(self, rows: Rows, num_logits: int) -> tuple[float, ...]:
        """Return the features of a step with these rows, (start, count) each."""
        return values(self.features, rows, num_logits)

    def plus(self, found: tuple[float, ...], start: int, count: int, num_logits: int) -> tuple[float, ...]:
        """Return the features of a step that has one more row than the one with the features `found`."""
        return plus(self.features, found, start, count, num_logits)

    def seconds(self, found: tuple[float, ...]) -> float:
        """Return the predicted time of a step with these features."""
        return _dot(self.overhead, found) + _bound_s(self.stages, found)

    def text_s(self, start: int, end: int, chunk: int) -> float:
        """Return the predicted time of computing tokens [start, end) of one text alone, `chunk` in a step."""
        steps = [self.values([(first, min(chunk, end - first))], 0) for first in range(start, end, chunk)]
        return sum([self.seconds(found) + self.host_s for found in steps])

    def limit_s(self, goal_s: float) -> float:
        """Return the predicted time of steps with which 99% of the times between tokens are within a goal."""
        return goal_s / self.tail - self.host_s

    def roof_s(self, found: tuple[float, ...]) -> float:
        """Return the time at the ceilings."""
        return _bound_s(self.roof, found)

    def limits(self, found: tuple[float, ...]) -> dict[Limit | Literal["overhead"], float]:
        """Return the predicted seconds of a step by what limits them, "overhead" included."""
        limits: dict[Limit | Literal["overhead"], float] = {"overhead": _dot(self.overhead, found)}
        for stage in self.stages:
            memory, arithmetic = _dot(stage.memory, found), _dot(stage.arithmetic, found)
            limit: Limit = stage.place if memory >= arithmetic else stage.kind
            limits[limit] = limits.get(limit, 0.0) + max(memory, arithmetic)
        return limits


class StepCosts(NamedTuple):
    """The cost of every step as sums of features: coefficients of each quantity, by feature."""

    features: tuple[Feature, ...]
    flops: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    kv_read_bytes: tuple[float, ...]
    kv_write_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    def of(self, rows: Rows, num_logits: int) -> tuple[float, ...]:
        """Return the five quantities, in the order above, of a step with these rows of (start, count)."""
        found = values(self.features, rows, num_logits)
        return tuple([_dot(coefficients, found) for coefficients in self[1:]])


def _dot(coefficients: tuple[float, ...], found: tuple[float, ...]) -> float:
    return sum(map(mul, coefficients, found))


def _bound_s(stages: tuple[Stage, ...], found: tuple[float, ...]) -> float:
    return sum([max(_dot(one.memory, found), _dot(one.arithmetic, found)) for one in stages])
