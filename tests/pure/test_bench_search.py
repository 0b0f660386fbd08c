"""The search for the highest rate that keeps a goal, on a server whose queue is computed."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence

import pytest

from quire.bench.driver import LoadRun
from quire.bench.metrics import Timeline, summarize
from quire.bench.saturation import SATURATED, wait_growth
from quire.bench.search import MAX_TRIALS, PRECISION, Search, Trial, search
from quire.bench.trials import Outcome
from quire.bench.workload import Request, poisson
from quire.goals import Goal

WORKERS, SERVICE_S = 4, 0.4  # ten requests a second
CAPACITY = WORKERS / SERVICE_S


def timelines(arrivals: Sequence[float]) -> list[Timeline]:
    """Requests that wait for a worker; a token comes after a tenth of their service, the last at its end."""
    free = [0.0] * WORKERS
    found = []
    for at_s in arrivals:
        begin_s = max(at_s, heapq.heappop(free))
        heapq.heappush(free, begin_s + SERVICE_S)
        chunks = [begin_s + SERVICE_S * share for share in (0.1, 1.0)]
        found.append(Timeline(at_s, at_s, chunks, chunks[-1], 8, 2))
    return found


def trial(rate: float, goal: Goal, seed: int = 0, count: int = 400) -> Trial:
    requests = poisson([Request("", 2)] * count, rate, seed)
    run = LoadRun(0.0, timelines=timelines([request.at_s for request in requests]))
    run.end_s = max(one.end_s for one in run.timelines)
    summary = summarize(run.timelines, run.duration_s, goal)
    return Trial(rate, run, summary, goal, wait_growth(run.timelines))


def found(goal: Goal, first: float = 1.0, **how: int) -> Search:
    async def measure(rate: float) -> Trial:
        return trial(rate, goal, **how)

    return asyncio.run(search(measure, first))


def highest(keeps: Callable[[float], bool]) -> float:
    """The highest rate of a fine grid up to which all rates keep something."""
    rate = 1.0
    while keeps(rate):
        rate *= 1.01
    return rate


def test_the_highest_rate_is_found() -> None:
    goal = Goal.parse("ttft_p90<200ms")
    result = found(goal)
    expected = highest(lambda rate: not trial(rate, goal).problem)
    assert result.low == pytest.approx(expected, rel=PRECISION - 1)
    assert result.low < CAPACITY
    assert result.high <= PRECISION * result.low
    assert not trial(result.low, goal).problem
    assert "ttft_p90<200ms" in trial(result.high, goal).problem


def test_a_search_may_begin_too_high() -> None:
    goal = Goal.parse("ttft_p90<200ms")
    assert found(goal, 40.0).low == pytest.approx(found(goal).low, rel=0.05)


def test_other_arrivals_give_about_the_same_rate() -> None:
    goal = Goal.parse("e2e_p90<1s")
    rates = [found(goal, seed=seed, count=2000).low for seed in range(4)]
    assert max(rates) / min(rates) < 1.1


def test_a_saturated_server_ends_the_search_even_if_the_goal_is_kept() -> None:
    goal = Goal.parse("itl<1s")
    result = found(goal)
    assert CAPACITY * 0.95 < result.low < CAPACITY * 1.2
    assert any("saturated" in one.problem for one in result.trials)
    assert all(one.goal.met(one.summary.figures()) for one in result.trials)


def test_a_search_ends_after_a_number_of_trials() -> None:
    async def easy(rate: float) -> Trial:
        return trial(min(rate, 1.0), Goal.parse("ttft<1s"))

    result = asyncio.run(search(easy, 1.0))
    assert len(result.trials) == MAX_TRIALS
    assert math.isinf(result.high)
    never = found(Goal.parse("ttft<1ms"))
    assert (never.low, len(never.trials)) == (0.0, MAX_TRIALS)


def test_requests_that_fail_break_a_goal() -> None:
    kept = trial(1.0, Goal.parse("ttft<1s"), count=100)
    assert not kept.problem
    for refused in kept.run.timelines[:3]:
        refused.error, refused.is_rejected = "HTTP 503 server_overloaded", True
    failing = Trial(1.0, kept.run, summarize(kept.run.timelines, 100.0, kept.goal), kept.goal)
    assert failing.problem == "3 of 100 requests failed"


def test_answers_a_second_are_counted_while_they_come() -> None:
    assert trial(5.0, Goal()).answers_per_s == pytest.approx(5.0, rel=0.05)
    assert trial(30.0, Goal()).answers_per_s == pytest.approx(CAPACITY, rel=0.05)


def test_the_outcome_of_several_searches() -> None:
    outcome = Outcome([Search(low=rate) for rate in (4.0, 3.0, 5.0)])
    assert (outcome.rate, outcome.spread) == (4.0, 0.5)


@pytest.mark.parametrize(("rate", "growth"), [(5.0, 0.0), (9.0, 0.0), (15.0, 0.5), (20.0, 1.0), (40.0, 3.0)])
def test_waits_grow_as_fast_as_the_load_exceeds_the_server(rate: float, growth: float) -> None:
    assert trial(rate, Goal(), count=1000).wait_growth == pytest.approx(growth, rel=0.1, abs=0.06)


def test_a_full_but_steady_server_is_not_saturated() -> None:
    growths = [trial(0.95 * CAPACITY, Goal(), seed).wait_growth for seed in range(20)]
    assert sum(growth > SATURATED for growth in growths) <= 1


def test_the_trend_is_seen_before_the_run_has_ended() -> None:
    ended = timelines([0.05 * index for index in range(100)])  # twice the capacity
    assert wait_growth(ended) == pytest.approx(1.0, rel=0.05)
    cut = [one if one.chunk_s[0] < 4.0 else Timeline(one.sent_s) for one in ended if one.sent_s < 4.0]
    assert sum(not one.chunk_s for one in cut) > 30
    assert wait_growth(cut) == pytest.approx(1.0, rel=0.05)


def test_a_few_requests_have_no_trend() -> None:
    ended = timelines([0.001 * index for index in range(8)])
    assert wait_growth(ended) == 0.0
    assert wait_growth([]) == 0.0
