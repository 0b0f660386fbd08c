"""Laws of a machine at which steps reach only a share of the roof."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.step_law import Stage, StepLaw
from quire.program.features import ONE, ROWS
from quire.simulation.clients import Delays


class RoofShares(NamedTuple):
    """Shares of the roof's bandwidth and arithmetic that steps reach, and the times that are added.

    Each step adds `step_s` and `row_s` for each of its rows. A client is away from the engine by the Delays
    of `request_s` and `output_s`.
    """

    memory: float = 1.0
    arithmetic: float = 1.0
    step_s: float = 0.0
    row_s: float = 0.0
    request_s: float = 0.0
    output_s: float = 0.0

    @property
    def delays(self) -> Delays:
        """Return the delays of clients."""
        return Delays(self.request_s, self.output_s)


def at_shares(roof: StepLaw, shares: RoofShares) -> StepLaw:
    """Return the law of a machine whose ceilings give `roof`, at these shares of it."""
    overhead = [0.0] * len(roof.features)
    overhead[ONE], overhead[ROWS] = shares.step_s, shares.row_s
    stages = tuple(_times_stage(one, 1 / shares.memory, 1 / shares.arithmetic) for one in roof.roof)
    return roof._replace(stages=stages, overhead=tuple(overhead))


def slower(law: StepLaw, factor: float) -> StepLaw:
    """Return a law whose steps, and the time between them, take `factor` times as long."""
    return law._replace(
        stages=tuple(Stage(_times(one.memory, factor), _times(one.arithmetic, factor)) for one in law.stages),
        overhead=_times(law.overhead, factor),
        host_s=law.host_s * factor,
    )


def _times_stage(stage: Stage, memory: float, arithmetic: float) -> Stage:
    return stage._replace(
        memory=_times(stage.memory, memory), arithmetic=_times(stage.arithmetic, arithmetic)
    )


def _times(coefficients: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(one * factor for one in coefficients)
