"""StepLaw: the predicted time of a step, in plain numbers that a recording can keep.

Calibration (quire.roofline) makes it from the folded costs of a program, the ceilings of the machine and the
records of steps, and gives it to the scheduler with `Scheduler.calibrate`, like any other recorded call. So
plans that depend on predicted times remain a pure function of the calls.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.program.features import Feature, Rows


class Stage(NamedTuple):
    """A part of a step that is bound by memory or by arithmetic: seconds of each, by feature."""

    memory: tuple[float, ...]
    arithmetic: tuple[float, ...]


class StepLaw(NamedTuple):
    """The time of a step: the sum over `stages` of the longer of memory and arithmetic, and `overhead`.

    All coefficients are seconds by feature. `roof` are the stages at the measured ceilings, without overhead:
    what no implementation could beat. `host_s` is the mean time between two steps.
    """

    features: tuple[Feature, ...]
    stages: tuple[Stage, ...]
    overhead: tuple[float, ...]
    roof: tuple[Stage, ...]
    host_s: float = 0.0

    def values(self, rows: Rows, num_logits: int) -> tuple[float, ...]:
        """Return the features of a step with these rows, (start, count) each."""
        rows = tuple(rows)
        return tuple([feature.value(rows, num_logits) for feature in self.features])

    def seconds(self, values: tuple[float, ...]) -> float:
        """Return the predicted time of a step with these features."""
        return _dot(self.overhead, values) + _bound_s(self.stages, values)

    def roof_s(self, values: tuple[float, ...]) -> float:
        """Return the time at the ceilings."""
        return _bound_s(self.roof, values)


def _dot(coefficients: tuple[float, ...], values: tuple[float, ...]) -> float:
    return sum([a * b for a, b in zip(coefficients, values, strict=True)])


def _bound_s(stages: tuple[Stage, ...], values: tuple[float, ...]) -> float:
    return sum([max(_dot(one.memory, values), _dot(one.arithmetic, values)) for one in stages])
