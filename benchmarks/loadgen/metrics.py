"""Latencies and throughput of a server as its client saw them. Names and definitions are those of vLLM.

    TTFT       time to first token: from sending the request to the first chunk that brings tokens
    TPOT       time per output token: (E2EL - TTFT) / (tokens - 1); of one token, or one chunk, there is none
    ITL        inter-token latency: the gap between two successive chunks that bring tokens
    E2EL       end-to-end latency: from sending to the last chunk that brings tokens
    goodput    requests a second that met every goal; a failed request meets none

Percentiles interpolate linearly, as numpy.percentile does. No clock is read here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GOALS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class Timeline:
    """One request as its client saw it: times in seconds of one clock."""

    sent_s: float
    planned_s: float | None = None  # when it should have been sent
    chunk_s: list[float] = field(default_factory=list)  # arrivals of chunks that brought tokens
    end_s: float = 0.0  # when the reply, or its failure, was complete
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # as the server counts them; where it does not, chunks
    num_cached_tokens: int = 0
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
        """Both ends of every gap between chunks."""
        return pairwise(self.chunk_s)


@dataclass(frozen=True, slots=True)
class Goal:
    """Latencies in milliseconds that a request must meet to be good; None asks for nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Goal:
        """From words like "ttft:500"; raises ValueError for what is none."""
        found: dict[str, float] = {}
        for pair in pairs:
            name, _, number = pair.partition(":")
            if name not in GOALS or not number or not float(number) > 0:
                raise ValueError(f"{pair!r} is no goal: write {':MS, '.join(GOALS)}:MS")
            found[name] = float(number)
        return cls(**found)

    def __str__(self) -> str:
        wanted = [f"{name} {getattr(self, name):g} ms" for name in GOALS if getattr(self, name) is not None]
        return ", ".join(wanted) or "none"

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in GOALS)

    def is_met(self, timeline: Timeline) -> bool:
        """A request of one token has no time per token, and so meets any."""
        if timeline.error or not timeline.chunk_s:
            return False
        found = (timeline.ttft_s, timeline.tpot_s or 0.0, timeline.e2el_s)
        limits = (self.ttft, self.tpot, self.e2el)
        pairs = zip(found, limits, strict=True)
        return all(limit is None or 1e3 * (value or 0.0) <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of values, in their own unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None for no values."""
        ranked = sorted(values)
        if not ranked:
            return None
        p50, p90, p99 = (percentile(ranked, share) for share in (50, 90, 99))
        return cls(len(ranked), math.fsum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


def percentile(ranked: Sequence[float], share: float) -> float:
    """Of values in ascending order; between two of them linearly."""
    place = (len(ranked) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """All of a run. Latencies are in milliseconds, and of requests that did not fail."""

    duration_s: float
    completed: int
    good: int
    errors: dict[str, int]  # by kind, the most frequent first
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    max_concurrency: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None
    rejection: Spread | None  # how long a refusal for being full took
    lateness: Spread | None  # how much later than planned requests were sent

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def per_s(self, count: float) -> float:
        return count / self.duration_s if self.duration_s else 0.0


def summarize(timelines: Sequence[Timeline], duration_s: float, goal: Goal) -> Summary:
    """The figures of a run that took `duration_s` in all."""
    done = [timeline for timeline in timelines if not timeline.error]
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        good=sum(goal.is_met(timeline) for timeline in done),
        errors=dict(Counter(timeline.error for timeline in timelines if timeline.error).most_common()),
        num_prompt_tokens=sum(timeline.num_prompt_tokens for timeline in done),
        num_output_tokens=sum(timeline.num_output_tokens for timeline in done),
        num_cached_tokens=sum(timeline.num_cached_tokens for timeline in done),
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
    """Return the maximum number of open requests; an end goes before a beginning of the same moment."""
    changes = sorted(
        change for timeline in timelines for change in ((timeline.sent_s, 1), (timeline.end_s, -1))
    )
    now = highest = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return highest


def good_between(timelines: Iterable[Timeline], goal: Goal, begin_s: float, end_s: float) -> float:
    """Goodput of a part of a run: good requests a second that ended within it."""
    good = sum(begin_s <= t.end_s < end_s and goal.is_met(t) for t in timelines)
    return good / (end_s - begin_s)


def gaps_within(timelines: Iterable[Timeline], begin_s: float, end_s: float) -> list[float]:
    """Gaps, in seconds, that overlap a part of a run: what streams felt of something that happened in it."""
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
    """A run cut into `count` equal pieces. A chunk counts as its request's mean tokens a chunk."""
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
