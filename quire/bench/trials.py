"""Runs at several rates: those that are given, or those of a search for the highest that keeps a goal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quire.bench.load import DEFAULT_PROMPTS, LoadOptions
from quire.bench.metrics import Summary, summarize
from quire.bench.openai_api import Unusable
from quire.bench.saturation import wait_growth
from quire.bench.search import Search, Trial, search
from quire.bench.target import Target
from quire.errors import QuireError
from quire.goals import Goal

NUM_ALONE = 5  # requests by which the latency of an idle server is measured
SHORTEST_S = 10.0  # that requests arrive in a trial
LATENCIES = 5.0  # of an idle server, for which requests arrive in a trial
REPEATED_STEP = 1.2  # between the first rates of a search whose result is known about


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of all searches for one goal: the median and the spread of the rates."""

    searches: Sequence[Search]

    @property
    def rates(self) -> list[float]:
        return sorted(one.low for one in self.searches)

    @property
    def rate(self) -> float:
        """Return the median, the lower one of two."""
        return self.rates[(len(self.rates) - 1) // 2]

    @property
    def spread(self) -> float:
        """Return the difference of the highest and the lowest rate, as a share of the median."""
        return (self.rates[-1] - self.rates[0]) / self.rate if self.rate else 0.0

    @property
    def trials(self) -> list[Trial]:
        return [trial for one in self.searches for trial in one.trials]


class Tester:
    """Makes trials of a target, and shows each when it ends."""

    def __init__(self, target: Target, load: LoadOptions, goal: Goal, show: Callable[[Trial], None]) -> None:
        self._target, self._load, self._goal, self._show = target, load, goal, show
        self._alone_s = 0.0

    async def alone(self) -> Summary:
        """Return the figures of requests that are alone in the server. Raises Unusable if they fail."""
        await self._target.settle()
        run = await self._target.alone(self._load, NUM_ALONE)
        found = summarize(run.timelines, run.duration_s, self._goal)
        if not found.e2el or found.failed:
            raise Unusable(f"a first request failed: {next(iter(found.errors), 'nothing came')}")
        self._alone_s = found.e2el.mean / 1e3
        return found

    async def at(self, rate: float, seed: int) -> Trial:
        """Make one trial. It has enough requests for percentiles, and lasts long enough to see saturation."""
        least_s = self._load.duration or max(SHORTEST_S, LATENCIES * self._alone_s)
        count = self._load.num_prompts or max(DEFAULT_PROMPTS, math.ceil(rate * least_s))
        load = replace(self._load, request_rate=rate, num_prompts=count, duration=None, seed=seed)
        await self._target.settle()
        run = await self._target.run(load, f"{rate:.2f} requests/s ", may_stop=True)
        timelines = run.timelines
        growth = wait_growth(timelines)
        trial = Trial(rate, run, summarize(timelines, run.duration_s, self._goal), self._goal, growth)
        self._show(trial)
        return trial

    async def sweep(self, rates: Sequence[float], repeats: int) -> list[Trial]:
        """Make a trial at each rate; repeated rounds have other arrivals."""
        seed = self._load.seed
        return [await self.at(rate, seed + number) for number in range(repeats) for rate in rates]

    async def highest(self, alone: Summary, repeats: int) -> Outcome:
        """Search `repeats` times, each with other arrivals. Raises QuireError if no rate keeps the goal."""
        broken = self._goal.broken(alone.figures())
        if broken:
            found = ", ".join(
                f"{limit.name} {alone.figures()[limit.figure] or 0:,.0f} ms" for limit in broken
            )
            raise QuireError(
                f"no rate keeps the goal: a request alone has {found}", f"the goal is {self._goal}"
            )
        searches: list[Search] = []
        for number in range(repeats):
            seed = self._load.seed + number
            first, step = (searches[0].low, REPEATED_STEP) if searches else (1 / self._alone_s, 2.0)
            searches.append(await search(partial(self.at, seed=seed), first, step))
            if not searches[-1].low:
                raise QuireError(
                    "no rate was found that keeps the goal", "the last trial says what breaks it"
                )
        return Outcome(searches)
