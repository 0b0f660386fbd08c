"""The search for the highest rate that keeps a goal: doubling, then bisection.

A trial is a run at one rate. It fails if it breaks the goal, if requests fail, or if the server is saturated:
from there on a goal of ITL alone may be kept while requests wait without bound.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from quire.bench.driver import LoadRun
from quire.bench.http_client import GIVEN_UP
from quire.bench.metrics import Summary
from quire.bench.saturation import SATURATED
from quire.goals import Goal

MAX_FAILED_SHARE = 0.01  # of the requests of a trial that keeps its goal
PRECISION = 1.05  # upper over lower end of the interval in which a search ends
MAX_TRIALS = 14  # of one search


@dataclass(frozen=True, slots=True)
class Trial:
    """A run at one rate and its figures; `wait_growth` tells if the server was saturated."""

    rate: float
    run: LoadRun
    summary: Summary
    goal: Goal
    wait_growth: float = 0.0

    @property
    def answers_per_s(self) -> float:
        """Return the rate at which answers ended, from the first to the last one."""
        ends = sorted(one.end_s for one in self.run.timelines if not one.error)
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else 0.0

    @property
    def is_saturated(self) -> bool:
        return self.wait_growth > SATURATED

    @property
    def problem(self) -> str:
        """Return the reason that this rate is too high, or nothing."""
        if self.is_saturated:
            return f"saturated: TTFT grows by {self.wait_growth:.2f} s each second"
        failed = self.summary.failed - self.summary.errors.get(GIVEN_UP, 0)
        if failed > MAX_FAILED_SHARE * (self.summary.completed + failed):
            return f"{failed:,} of {self.summary.completed + failed:,} requests failed"
        broken = self.goal.broken(self.summary.figures())
        return f"breaks {', '.join(map(str, broken))}" if broken else ""


@dataclass(slots=True)
class Search:
    """A search and its trials in their order: `low` keeps the goal, `high` does not.

    `step` is the ratio of rates until there is one of each.
    """

    step: float = 2.0
    low: float = 0.0
    high: float = math.inf
    trials: list[Trial] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.high <= PRECISION * self.low or len(self.trials) >= MAX_TRIALS

    def next_rate(self, first: float) -> float:
        """Return the rate of the next trial."""
        if not self.trials:
            return first
        if not self.low:
            return self.high / self.step
        return self.low * self.step if math.isinf(self.high) else math.sqrt(self.low * self.high)

    def take(self, trial: Trial) -> None:
        """Narrow the interval by a trial."""
        self.trials.append(trial)
        if trial.problem:
            self.high = trial.rate
        else:
            self.low = trial.rate


async def search(measure: Callable[[float], Awaitable[Trial]], first: float, step: float = 2.0) -> Search:
    """Find the highest rate whose trial keeps the goal, beginning with the rate `first`."""
    found = Search(step)
    while not found.has_ended:
        found.take(await measure(found.next_rate(first)))
    return found
