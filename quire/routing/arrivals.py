"""The rate of arrivals, where it is going, and the mean size of requests, from counts since the start."""

from __future__ import annotations

import math
from collections import deque

from quire.routing.scaling import Observed

LEVEL_S, TREND_S, SIZES_S = 45.0, 240.0, 600.0  # over which rate, trend and sizes are averaged
RECENT_S = 15.0  # in which a jump of the rate shows
JUMP = 3.0  # standard deviations of a Poisson count that chance does not explain


class Arrivals:
    """The rate of arrivals and the sizes of requests, averaged with weights that fall exponentially.

    The rate follows a straight line: two averages of different length lag behind it by different times, which
    tells its slope. A count that a Poisson process at this rate would not give begins anew at the count.
    """

    def __init__(self) -> None:
        self._level = self._slow = 0.0  # arrivals a second
        self._recent: deque[Observed] = deque()
        self._sums = dict.fromkeys(("prompts", "prompt tokens", "cached", "ended", "outputs"), 0.0)

    def take(self, now: Observed) -> None:
        """Take in the counts at a later moment."""
        recent = self._recent
        last = recent[-1] if recent else Observed(0.0, 0)
        recent.append(now)
        while len(recent) > 2 and recent[1].at_s <= now.at_s - RECENT_S:
            recent.popleft()
        passed_s = now.at_s - last.at_s
        if passed_s <= 0:
            return
        self._average(now, last, passed_s)
        self._rate(now, last, passed_s)

    def _average(self, now: Observed, last: Observed, passed_s: float) -> None:
        kept = math.exp(-passed_s / SIZES_S)
        more = {
            "prompts": now.num_arrived - last.num_arrived,
            "prompt tokens": now.num_prompt_tokens - last.num_prompt_tokens,
            "cached": now.num_cached_tokens - last.num_cached_tokens,
            "ended": now.num_ended - last.num_ended,
            "outputs": now.num_output_tokens - last.num_output_tokens,
        }
        for name, count in more.items():
            self._sums[name] = kept * self._sums[name] + count

    def _rate(self, now: Observed, last: Observed, passed_s: float) -> None:
        rate = (now.num_arrived - last.num_arrived) / passed_s
        if len(self._recent) < 2:
            self._level = self._slow = rate
            return
        for name, span_s in (("_level", LEVEL_S), ("_slow", TREND_S)):
            weight = max(1 - math.exp(-passed_s / span_s), passed_s / now.at_s)  # at first, a plain mean
            setattr(self, name, getattr(self, name) + weight * (rate - getattr(self, name)))
        first = self._recent[0]
        recent_s, count = now.at_s - first.at_s, now.num_arrived - first.num_arrived
        expected = self._level * recent_s
        if count - expected > JUMP * math.sqrt(max(expected, 1.0)):
            self._level = self._slow = count / recent_s

    def rate(self, ahead_s: float) -> float:
        """Return the rate expected so long from now."""
        slope = (self._level - self._slow) / (TREND_S - LEVEL_S)
        return max(0.0, self._level + slope * (LEVEL_S + ahead_s))

    def uncertainty(self) -> float:
        """Return the standard deviation of the rate, as chance has it in a count over twice LEVEL_S."""
        return math.sqrt(self._level / (2 * LEVEL_S))

    @property
    def num_prompt_tokens(self) -> float:
        """The mean length of a prompt."""
        return self._sums["prompt tokens"] / (self._sums["prompts"] or 1.0)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that were cached."""
        return min(self._sums["cached"] / (self._sums["prompt tokens"] or 1.0), 0.99)

    @property
    def num_output_tokens(self) -> float:
        """The mean length of an answer; 0 before one has ended."""
        return self._sums["outputs"] / (self._sums["ended"] or 1.0)
