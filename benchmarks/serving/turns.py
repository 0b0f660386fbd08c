"""Rates that take turns in one run, and what the server gave at each.

A machine that changes its speed within seconds does so for all rates alike when each has it for seconds only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from quire.bench.driver import LoadRun
from quire.bench.metrics import Spread, Timeline
from quire.bench.workload import Request, first, poisson
from quire.goals import Goal
from serving.processes import ServerProcess

SKIPPED = 1 / 3  # of a turn, at its beginning: what ends then is of the turn before


@dataclass(frozen=True, slots=True)
class Turn:
    """A rate, in times of the capacity, and when it has its turn, from the beginning of the run."""

    times: float
    begin_s: float
    end_s: float

    @property
    def counted(self) -> tuple[float, float]:
        return self.begin_s + SKIPPED * (self.end_s - self.begin_s), self.end_s


def in_turns(rates: Sequence[float], rounds: int, seconds: float) -> list[Turn]:
    """Each rate once a round."""
    return [
        Turn(times, index * seconds, (index + 1) * seconds) for index, times in enumerate([*rates] * rounds)
    ]


def arrivals(requests: Iterable[Request], turns: Sequence[Turn], capacity: float) -> list[Request]:
    """Requests at random moments, as many a second as the turn says."""
    source: Iterator[Request] = iter(requests)
    found: list[Request] = []
    for seed, turn in enumerate(turns):
        own = first(poisson(source, turn.times * capacity, seed), 1 << 60, turn.end_s - turn.begin_s)
        found += [replace(request, at_s=turn.begin_s + request.at_s) for request in own]
    return found


async def cores(server: ServerProcess, turns: Sequence[Turn]) -> list[dict[str, float]]:
    """Return the share of a core that server and client take in each turn."""
    begin_s, used = time.perf_counter(), []
    for at_s in (turns[0].begin_s, *(turn.end_s for turn in turns)):
        await asyncio.sleep(begin_s + at_s - time.perf_counter())
        used.append((server.usage()["server"].cpu_s, time.process_time()))
    return [
        {
            "server_cores": round((after[0] - before[0]) / (turn.end_s - turn.begin_s), 3),
            "client_cores": round((after[1] - before[1]) / (turn.end_s - turn.begin_s), 3),
        }
        for turn, (before, after) in zip(turns, pairwise(used), strict=True)
    ]


def row(turn: Turn, run: LoadRun, goal: Goal) -> dict[str, Any]:
    """Return the results of a turn: goodput and tokens a second, and the requests of its counted part."""
    begin_s, end_s = (run.begin_s + at_s for at_s in turn.counted)
    asked = [t for t in run.timelines if turn.begin_s <= t.sent_s - run.begin_s < turn.end_s]
    answered = [t for t in asked if not t.error]
    refused = Spread.of(1e3 * (t.end_s - t.sent_s) for t in asked if t.is_rejected)
    lateness = Spread.of(1e3 * (t.sent_s - t.planned_s) for t in asked if t.planned_s is not None)
    return {
        "times": turn.times,
        "goodput": round(good_between(run.timelines, goal, begin_s, end_s), 2),
        "tokens_per_s": round(_num_chunks(run.timelines, begin_s, end_s) / (end_s - begin_s), 1),
        "answered": len(answered),
        "not_good": sum(not t.keeps(goal) for t in answered),
        "rejected": sum(t.is_rejected for t in asked),
        "retry_after": sum(bool(t.retry_after) for t in asked),
        "rejection_p50_ms": refused and round(refused.p50, 2),
        "rejection_p99_ms": refused and round(refused.p99, 2),
        "client_late_p99_ms": lateness and round(lateness.p99, 2),
        "other_errors": sum(bool(t.error) and not t.is_rejected for t in asked),
    }


def good_between(timelines: Iterable[Timeline], goal: Goal, begin_s: float, end_s: float) -> float:
    """Return the goodput of a part of a run: good requests a second that ended within it."""
    good = sum(begin_s <= t.end_s < end_s and t.keeps(goal) for t in timelines)
    return good / (end_s - begin_s)


def _num_chunks(timelines: Iterable[Timeline], begin_s: float, end_s: float) -> int:
    return sum(begin_s <= at_s < end_s for timeline in timelines for at_s in timeline.chunk_s)
