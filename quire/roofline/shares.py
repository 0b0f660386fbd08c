"""Typical shares of the roof: what part of peak rates published engines reach, as a few plain constants.

`benchmarks/published.py` fits them on half of the published measurements and prints what part of the other
half the resulting ranges hold (docs/decisions/0024-plan.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.step_law import Stage, StepLaw
from quire.program.features import ONE, ROWS
from quire.roofline.folded import FoldedCost
from quire.roofline.law import law_at_the_roof
from quire.roofline.machines import Kind, Machine

SPREAD = 2.5  # the upper end of a range over its lower end
NODE_CARDS = 8  # cards of one node, with fast links between them


@dataclass(frozen=True, slots=True)
class TypicalShares:
    """Constants that are typical of one kind of machine, besides its peak rates.

    `memory` and `arithmetic` are shares of the peaks. The seconds are overheads of a step: per layer on one
    card (`layer_s`); per layer on several, which exchange results twice (`cards_s`, `doubling_s` more for
    each doubling of the cards, and `nodes_s` more beyond one node); per sequence (`row_s`); and of any step.
    """

    memory: float
    arithmetic: float
    layer_s: float = 0.0
    cards_s: float = 0.0
    doubling_s: float = 0.0
    nodes_s: float = 0.0
    row_s: float = 0.0
    step_s: float = 0.0

    def overhead_s(self, cards: int, layers: int) -> float:
        """Return the overhead of a step, without that of its sequences."""
        if cards == 1:
            layer = self.layer_s
        else:
            layer = self.cards_s + self.doubling_s * math.log2(cards) + self.nodes_s * (cards > NODE_CARDS)
        return self.step_s + layers * layer


# "gpu": fitted on published measurements of an H100. "cpu": Quire, by the table of docs/performance.md.
TYPICAL: dict[Kind, TypicalShares] = {
    "gpu": TypicalShares(
        0.8, 0.63, layer_s=19e-6, cards_s=16e-6, doubling_s=22e-6, nodes_s=75e-6, row_s=28e-6
    ),
    "cpu": TypicalShares(memory=0.88, arithmetic=0.73, layer_s=12e-6, row_s=150e-6, step_s=100e-6),
}


class Rate(NamedTuple):
    """Tokens per second: the range to expect, what is typical, and at the roof."""

    low: float
    typical: float
    high: float
    roof: float


class Span(NamedTuple):
    """A predicted time: at the roof, and at the typical share. `low` to `high` is where to expect it."""

    roof: float
    typical: float

    @property
    def low(self) -> float:
        return max(self.roof, self.typical / math.sqrt(SPREAD))

    @property
    def high(self) -> float:
        return self.typical * math.sqrt(SPREAD)

    def plus(self, other: Span, times: float = 1.0) -> Span:
        return Span(self.roof + times * other.roof, self.typical + times * other.typical)

    def times(self, factor: float) -> Span:
        return Span(factor * self.roof, factor * self.typical)

    def rate(self, tokens: float) -> Rate:
        """Return tokens per second if so many take this time."""
        return Rate(tokens / self.high, tokens / self.typical, tokens / self.low, tokens / self.roof)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def typical_law(
    folded: FoldedCost,
    machine: Machine,
    cards: int = 1,
    *,
    layers: int,
    shares: TypicalShares | None = None,
) -> StepLaw:
    """Return the law of steps on `cards` equal machines: its roof, and times at the typical shares.

    Weights, cache and products are split evenly among the cards.
    """
    shares = shares or TYPICAL[machine.kind]
    law = law_at_the_roof(folded, machine.ceilings(cards), None if machine.kind == "cpu" else {})
    overhead = [0.0] * len(law.features)
    overhead[ONE] = shares.overhead_s(cards, layers)
    overhead[ROWS] = shares.row_s
    return law._replace(stages=tuple(_slowed(law.roof, shares)), overhead=tuple(overhead))


def _slowed(stages: tuple[Stage, ...], shares: TypicalShares) -> Iterator[Stage]:
    for stage in stages:
        memory = tuple([value / shares.memory for value in stage.memory])
        arithmetic = tuple([value / shares.arithmetic for value in stage.arithmetic])
        yield stage._replace(memory=memory, arithmetic=arithmetic)
