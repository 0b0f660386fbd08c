"""Scalers: what arrives is forecast, waiting is predicted as queueing theory has it, and nothing flaps."""

from __future__ import annotations

import math
import random

import pytest

from quire.engine.budget import Budget
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.routing.arrivals import Arrivals
from quire.routing.goal_scaler import VIOLATIONS, GoalScaler, LatencyGoal, ReplicaModel, waits_longer
from quire.routing.scaling import Highest, Observed, QueueLengthScaler

FEATURES = (*LEADING, Feature("positions"))  # one, rows, tokens, logits, positions
ROOF = (Stage((0.020, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 0.001, 0.0, 0.0)),)
LAW = StepLaw(FEATURES, ROOF, (0.001, 0.0, 0.0, 0.0, 0.0), ROOF)
GOAL = LatencyGoal(2.0, 0.2)


def scaler(goal: LatencyGoal = GOAL, **options) -> GoalScaler:
    model = ReplicaModel(LAW, Budget(512, 64), 16, 100_000)
    return GoalScaler(goal, model, **({"start_up_s": 30.0} | options))


def steady(at_s: float, rate: float, num_ready: int = 1, **fields) -> Observed:
    """A load of prompts of 400 tokens and answers of 100, for so long."""
    count = round(at_s * rate)
    sums = {"num_arrived": count, "num_prompt_tokens": 400 * count, "num_started": count}
    sums |= {"num_ended": count, "num_output_tokens": 100 * count}
    return Observed(at_s, num_ready, **(sums | fields))


def test_waiting_is_that_of_queueing_theory():
    """One server: the share that waits is the share of time it is busy. Two: a formula; and a simulation."""
    assert waits_longer(1, 0.7, 0.0) == pytest.approx(0.7)
    assert waits_longer(1, 0.7, 2.0) == pytest.approx(0.7 * math.exp(-0.6))
    assert waits_longer(2, 1.0, 0.0) == pytest.approx(1 / 3)
    assert waits_longer(3, 3.0, 1.0) == 1.0
    dice, free, at_s, late = random.Random(1), [0.0] * 5, 0.0, 0
    for _ in range(50_000):
        at_s += dice.expovariate(3.0)
        begin_s = max(at_s, min(free))
        free[free.index(min(free))] = begin_s + dice.expovariate(1.0)
        late += begin_s - at_s > 1.0
    assert late / 50_000 == pytest.approx(waits_longer(5, 3.0, 1.0), abs=0.004)


def test_the_rate_and_its_trend_are_those_of_what_arrives():
    """Five a second at first; then one more each minute, for half an hour."""
    arrivals, count, last_s = Arrivals(), 0.0, 0
    for at_s in range(5, 600, 5):
        arrivals.take(steady(at_s, 5.0))
    assert arrivals.rate(0.0) == pytest.approx(5.0)
    assert arrivals.rate(60.0) == pytest.approx(5.0, rel=1e-3)
    assert arrivals.num_prompt_tokens == 400
    assert arrivals.num_output_tokens == 100
    assert arrivals.cached_share == 0.0
    arrivals = Arrivals()
    for at_s in range(5, 1800, 5):
        count, last_s = 5.0 * at_s + at_s**2 / 120, at_s
        arrivals.take(Observed(at_s, 1, num_arrived=round(count)))
    assert arrivals.rate(0.0) == pytest.approx(5.0 + last_s / 60, rel=0.01)
    assert arrivals.rate(120.0) == pytest.approx(7.0 + last_s / 60, rel=0.01)


def test_the_size_of_requests_is_remembered_while_none_arrive():
    arrivals, before = Arrivals(), steady(600, 5.0)
    for at_s in range(5, 605, 5):
        arrivals.take(steady(at_s, 5.0)._replace(num_cached_tokens=100 * round(at_s * 5.0)))
    for at_s in range(605, 4 * 3600, 5):
        arrivals.take(before._replace(at_s=at_s, num_cached_tokens=300_000))
    assert arrivals.rate(0.0) < 1e-9
    assert arrivals.num_prompt_tokens == pytest.approx(400)
    assert arrivals.num_output_tokens == pytest.approx(100)
    assert arrivals.cached_share == pytest.approx(0.25)


def test_a_jump_is_believed_at_once_and_chance_is_not():
    arrivals = Arrivals()
    for at_s in range(5, 605, 5):
        arrivals.take(steady(at_s, 2.0))
    arrivals.take(Observed(605, 1, num_arrived=1210 + 6))
    assert arrivals.rate(0.0) < 2.5
    arrivals.take(Observed(610, 1, num_arrived=1216 + 40))
    assert arrivals.rate(0.0) > 4.0


def test_more_load_needs_more_replicas_and_shares_the_slack():
    needed = [scaler().needed(steady(600.0, rate, 100)) for rate in (0.1, 2.0, 8.0, 32.0)]
    assert needed == sorted(set(needed))
    per_rate = [count / rate for count, rate in zip(needed, (0.1, 2.0, 8.0, 32.0), strict=True)]
    assert per_rate == sorted(per_rate, reverse=True)
    assert scaler(LatencyGoal(0.8, 0.2)).needed(steady(600.0, 8.0, 100)) > needed[2]
    assert scaler(LatencyGoal(2.0, 0.03)).needed(steady(600.0, 8.0, 100)) > needed[2]
    one = scaler()
    count = one.needed(steady(600.0, 8.0, 100))
    shares = [one.violations(n, 8.0, 400, 400, 100) for n in (count - 1, count)]
    assert shares[1] <= VIOLATIONS < shares[0]


def test_cached_prompts_need_fewer():
    plain, cached = (steady(600.0, 8.0, 100, num_cached_tokens=n) for n in (0, 8 * 600 * 300))
    assert scaler().needed(cached) < scaler().needed(plain)


def test_open_requests_keep_their_replicas():
    assert scaler().needed(Observed(600.0, 5, num_open=70)) == 5
    assert scaler().needed(Observed(600.0, 5)) == 1


def test_what_waits_is_computed_within_the_goal_unless_there_is_room():
    """Waiting prompts that the replicas will have computed anyway when a new one is ready need none."""
    few, many = 8000, 400_000
    needed = [
        scaler().needed(steady(600.0, 2.0, 6, num_queued=n // 400, num_queued_tokens=n))
        for n in (0, few, many)
    ]
    assert needed[0] == needed[1] < needed[2]


def test_fewer_are_wanted_only_after_a_while():
    one = scaler(hold_s=60.0)
    assert one.target(steady(1.0, 8.0, 40)) == 40, "what there is at first may be needed"
    for at_s in range(5, 305, 5):
        high = one.target(steady(at_s, 8.0))
    count = 8 * 300
    targets = []
    for at_s in range(305, 605, 5):
        count += 5
        targets.append(one.target(Observed(at_s, high, num_arrived=count, num_prompt_tokens=400 * count)))
    assert targets[:12] == [high] * 12
    assert targets[-1] < high / 2


def test_the_highest_of_late():
    highest = Highest(10.0)
    assert [highest.take(at_s, value) for at_s, value in ((0, 3), (5, 1), (10, 2), (11, 1), (21, 1))] == [
        *(3, 3, 3, 2, 1)
    ]


def test_queue_lengths_are_averaged_and_believed_after_a_delay():
    delays = {"interval_s": 10.0, "look_back_s": 20.0, "up_delay_s": 20.0, "down_delay_s": 60.0}
    one, replicas, seen = QueueLengthScaler(4.0, **delays), 1, []
    for at_s in range(10, 210, 10):
        replicas = one.target(Observed(at_s, replicas, num_open=20 if at_s <= 60 else 2))
        seen.append(replicas)
    assert seen == [1, 1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1, 1, 1, 1, 1, 1, 1, 1]
