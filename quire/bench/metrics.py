"""Latencies and throughput of a server as its clients see them; `definitions.py` says what each one is.

Times come from outside, so the same figures can be computed of a simulation. No clock is read here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quire.bench.definitions import MEASURES
from quire.goals import Goal, Limit

_SHARES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_IN_JSON = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99", "largest": "max"}


@dataclass(slots=True)
class Timeline:
    """One request as its client saw it: times in seconds of one clock."""

    sent_s: float
    planned_s: float | None = None  # when it should have been sent
    chunk_s: list[float] = field(default_factory=list)  # arrivals of chunks that brought tokens
    end_s: float = 0.0  # when the reply, or its failure, was complete
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # as the server counts them; chunks if it does not
    num_cached_tokens: int = 0
    num_drafted: int = 0  # of these and the next ones, what Quire's `timings` say
    num_accepted: int = 0
    decode_s: float = 0.0
    drafting_saved_s: float = 0.0
    error: str = ""  # the kind of failure; empty if there was none
    is_rejected: bool = False  # the server said that it is full
    retry_after: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def e2el_s(self) -> float | None:
        return self.chunk_s[-1] - self.sent_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        if len(self.chunk_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Yield both ends of every gap between chunks."""
        return pairwise(self.chunk_s)

    def keeps(self, goal: Goal) -> bool:
        """Return True if this request succeeded and keeps every limit of a goal by its own figures."""
        if self.error or not self.chunk_s:
            return False
        return all(limit.is_kept(self._value_ms(limit)) for limit in goal.limits)

    def _value_ms(self, limit: Limit) -> float | None:
        if limit.measure == "itl":
            spread = Spread.of(1e3 * (end - begin) for begin, end in self.gaps())
            return None if spread is None else spread.value(limit.statistic)
        own_s = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2el_s}[limit.measure]
        return None if own_s is None else 1e3 * own_s


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of values, in their own unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return None for no values."""
        ranked = sorted(values)
        if not ranked:
            return None
        shares = {name: percentile(ranked, share) for name, share in _SHARES.items()}
        return cls(len(ranked), math.fsum(ranked) / len(ranked), **shares, largest=ranked[-1])

    def value(self, statistic: str) -> float:
        """Return one of the statistics that goals may name."""
        return {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p95": self.p95, "p99": self.p99}[
            statistic
        ]


def percentile(ranked: Sequence[float], share: float) -> float:
    """Return a percentile of values in ascending order, by linear interpolation."""
    place = (len(ranked) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def in_json(name: str, spread: Spread | None) -> dict[str, float | None]:
    """Return the statistics of a measure in milliseconds under vLLM's names, such as `p99_ttft_ms`."""
    return {
        f"{word}_{name}_ms": None if spread is None else getattr(spread, own)
        for own, word in _IN_JSON.items()
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Latencies are in milliseconds, of the requests that succeeded."""

    duration_s: float
    completed: int
    good: int
    errors: dict[str, int]  # by kind, the most frequent first
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int
    decode_s: float
    drafting_saved_s: float
    max_concurrency: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None
    rejection: Spread | None
    lateness: Spread | None

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def per_s(self, count: float) -> float:
        """Return a count as a rate over the whole run."""
        return count / self.duration_s if self.duration_s else 0.0

    def figures(self) -> dict[str, float | None]:
        """Return the latencies under the names that goals refer to."""
        found: dict[str, float | None] = {}
        for name in MEASURES:
            found |= in_json(name, getattr(self, name))
        return found


def summarize(timelines: Sequence[Timeline], duration_s: float, goal: Goal) -> Summary:
    """Return the figures of a run that took `duration_s` in all."""
    done = [timeline for timeline in timelines if not timeline.error]
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        good=sum(timeline.keeps(goal) for timeline in done),
        errors=dict(Counter(timeline.error for timeline in timelines if timeline.error).most_common()),
        num_prompt_tokens=sum(timeline.num_prompt_tokens for timeline in done),
        num_output_tokens=sum(timeline.num_output_tokens for timeline in done),
        num_cached_tokens=sum(timeline.num_cached_tokens for timeline in done),
        num_drafted=sum(timeline.num_drafted for timeline in done),
        num_accepted=sum(timeline.num_accepted for timeline in done),
        decode_s=sum(timeline.decode_s for timeline in done),
        drafting_saved_s=sum(timeline.drafting_saved_s for timeline in done),
        max_concurrency=max_concurrency(timelines),
        ttft=_milliseconds(timeline.ttft_s for timeline in done),
        tpot=_milliseconds(timeline.tpot_s for timeline in done),
        itl=_milliseconds(end - begin for timeline in done for begin, end in timeline.gaps()),
        e2el=_milliseconds(timeline.e2el_s for timeline in done),
        rejection=_milliseconds(t.end_s - t.sent_s for t in timelines if t.is_rejected),
        lateness=_milliseconds(t.sent_s - t.planned_s for t in timelines if t.planned_s is not None),
    )


def _milliseconds(seconds: Iterable[float | None]) -> Spread | None:
    return Spread.of(1e3 * value for value in seconds if value is not None)


def max_concurrency(timelines: Iterable[Timeline]) -> int:
    """Return the maximum number of open requests. An end counts before a beginning of the same moment."""
    changes = sorted(
        change for timeline in timelines for change in ((timeline.sent_s, 1), (timeline.end_s, -1))
    )
    now = highest = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return highest


def gaps_within(timelines: Iterable[Timeline], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps, in seconds, that overlap a part of a run."""
    return [
        end - begin
        for timeline in timelines
        for begin, end in timeline.gaps()
        if begin < end_s and end > begin_s
    ]


@dataclass(slots=True)
class Bin:
    """A piece of a run."""

    tokens: float = 0.0  # that came
    open: int = 0  # requests at its beginning
    gap_s: float = 0.0  # the longest that ended in it


def bins(timelines: Iterable[Timeline], begin_s: float, end_s: float, count: int) -> list[Bin]:
    """Cut a run into `count` equal pieces. A chunk counts as its request's mean tokens per chunk."""
    width = (end_s - begin_s) / count
    pieces = [Bin() for _ in range(count)]

    def piece(at_s: float) -> Bin:
        return pieces[min(max(int((at_s - begin_s) / width), 0), count - 1)]

    for timeline in timelines:
        tokens = timeline.num_output_tokens / len(timeline.chunk_s) if timeline.chunk_s else 0.0
        for at_s in timeline.chunk_s:
            piece(at_s).tokens += tokens
        for gap_begin, gap_end in timeline.gaps():
            there = piece(gap_end)
            there.gap_s = max(there.gap_s, gap_end - gap_begin)
        for index in range(count):
            pieces[index].open += timeline.sent_s <= begin_s + index * width < timeline.end_s
    return pieces
