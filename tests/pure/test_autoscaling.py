"""Autoscaling of replicas: a scripted load on a fake clock, and what is done about it and why."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from test_scaling import LAW

from quire.cli.option_types import RANGE
from quire.cluster.autoscaling import INTERVAL_S, RETRY_S, Autoscaler, goal_of, replica_model
from quire.cluster.operations import Operations
from quire.config import EngineConfig, ServerConfig
from quire.engine.caches import BlockGroup
from quire.engine.open_request import OpenRequest
from quire.engine.request_limits import RequestLimits
from quire.engine.status import EngineStatus, Facts
from quire.errors import ConfigError, EngineDead
from quire.routing.goal_scaler import GoalScaler, LatencyGoal
from quire.routing.load_counts import LoadCounts
from quire.routing.scaling import Observed
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output

CONFIG = EngineConfig(max_num_seqs=16, max_num_prefill_tokens=64)
GOAL = LatencyGoal(2.0, 0.2)
LIMITS = RequestLimits(4096, (BlockGroup(6250), BlockGroup(10, window=64)), 16, 512)


class FakeReplicas:
    """Replicas that start at once, or with an error, and a status of some law."""

    def __init__(self, error: EngineDead | None = None) -> None:
        self.operations, self.load, self.start_up_s = Operations(), LoadCounts(), 30.0
        self.status = EngineStatus("ready", Facts({}, LIMITS, 4096), law=LAW)
        self.count, self.error = 1, error

    @property
    def numbers(self) -> list[int]:
        return list(range(self.count))

    def observed(self, at_s: float) -> Observed:
        return self.load.observed(at_s, self.count)

    async def scale(self, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.count = count

    def own(self, name: str, num_tokens: int = 400) -> OpenRequest:
        new = NewRequest(name, (1,) * num_tokens, SamplingParams(max_tokens=100), 0.0)
        return OpenRequest(new, self)  # type: ignore[arg-type]

    def serve(self, name: str) -> None:
        """A request that comes and ends: a prompt of 400 tokens, an answer of 100."""
        own = self.own(name)
        self.load.arrived(name, 400)
        own.deliver(Output(name, 0, token_ids=(1,) * 100))
        self.load.delivered(own, 0)
        self.load.ended(own)


async def follow(
    replicas: FakeReplicas, scaler: Autoscaler, rate: Callable[[float], float], until_s: float
) -> list[int]:
    """The numbers of replicas over time under a load."""
    counts, due, at_s = [], 0.0, 0.0
    while at_s < until_s:
        scaler.look(replicas, at_s)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        counts.append(replicas.count)
        due += rate(at_s) * INTERVAL_S
        while due >= 1:
            due -= 1
            replicas.serve(f"{at_s}-{due}")
        at_s += INTERVAL_S
    return counts


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_replicas_follow_the_load_within_their_range() -> None:
    """A load that one replica cannot compute, and then next to none: up to what is needed, and down again."""

    async def check() -> None:
        replicas, scaler = FakeReplicas(), Autoscaler(GOAL, CONFIG, 1, 3)
        counts = await follow(replicas, scaler, lambda at_s: 6.0 if 100 <= at_s < 300 else 0.05, 900)
        times = [at_s * INTERVAL_S for at_s in range(len(counts))]
        assert {count for at_s, count in zip(times, counts, strict=True) if at_s < 100} == {1}
        assert max(counts) == 3
        assert counts[times.index(300)] == 3
        assert counts[-1] == 1
        assert counts == sorted(counts[: counts.index(3)]) + sorted(
            counts[counts.index(3) :], reverse=True
        ), "it flaps"
        assert scaler.changes[0].before == 1
        assert scaler.changes[-1].after == 1
        up, down = scaler.changes[0], scaler.changes[-1]
        share = float(up.reason.split("goal: ")[1].split("%")[0])
        assert share > 1.0
        assert f"by {up.before}" in up.reason
        assert "0.0% of requests by 1" in down.reason
        last = replicas.operations.last
        assert last is not None
        assert last.what == f"scaling from {down.before} to 1: {down.reason}"

    run(check())


def test_refused_requests_may_be_the_first() -> None:
    """The server refused them before it knew of any prompt: there is no number of tokens to predict by."""

    async def check() -> None:
        replicas, scaler = FakeReplicas(), Autoscaler(GOAL, CONFIG, 1, 3)
        scaler.look(replicas, 0.0)
        replicas.load.refused(5, 0)
        scaler.look(replicas, INTERVAL_S)
        assert not scaler.changes

    run(check())


def test_refused_requests_are_load() -> None:
    """Where the server refuses what one replica cannot compute in time, another is started all the same."""

    async def check() -> None:
        replicas, scaler = FakeReplicas(), Autoscaler(GOAL, CONFIG, 1, 2)
        replicas.serve("first")
        for number in range(20):
            scaler.look(replicas, number * INTERVAL_S)
            await asyncio.sleep(0)
            replicas.load.refused(30, 0)
        assert replicas.count == 2
        assert replicas.load.observed(1.0, 1).num_prompt_tokens == 601 * 400

    run(check())


def test_nothing_is_decided_during_another_operation_or_without_a_law() -> None:
    async def check() -> None:
        replicas, scaler = FakeReplicas(), Autoscaler(GOAL, CONFIG, 1, 2)
        ends = asyncio.Event()

        async def slow() -> None:
            await ends.wait()

        replicas.operations.begin("restarting", slow())
        for number in range(5):
            replicas.load.refused(100, 40_000)
            scaler.look(replicas, number * INTERVAL_S)
            await asyncio.sleep(0)
        assert (replicas.count, len(scaler.changes)) == (1, 0)
        ends.set()
        await asyncio.sleep(0.001)
        law, replicas.status.law = replicas.status.law, None
        scaler.look(replicas, 30.0)
        assert not scaler.changes
        replicas.status.law = law
        scaler.look(replicas, 35.0)
        await asyncio.sleep(0)
        assert replicas.count == 2

    run(check())


def test_what_failed_is_not_tried_again_at_once() -> None:
    async def check() -> None:
        replicas = FakeReplicas(EngineDead("no memory"))
        scaler = Autoscaler(GOAL, CONFIG, 1, 2)
        tried_s = []
        for number in range(40):
            replicas.load.refused(100, 40_000)
            scaler.look(replicas, at_s := number * INTERVAL_S)
            if len(scaler.changes) > len(tried_s):
                tried_s.append(at_s)
            await asyncio.sleep(0)
        gaps = [later - earlier for earlier, later in itertools.pairwise(tried_s)]
        assert len(gaps) >= 2
        assert set(gaps) == {RETRY_S + INTERVAL_S}  # from the look that sees the failure
        replicas.error = None
        for number in range(40, 60):
            scaler.look(replicas, number * INTERVAL_S)
            await asyncio.sleep(0)
        assert replicas.count == 2

    run(check())


def test_a_goal_that_no_number_keeps_ends_at_the_most() -> None:
    model = replica_model(CONFIG, FakeReplicas().status)
    assert model is not None
    scaler = GoalScaler(LatencyGoal(math.inf, 1e-6), model, start_up_s=30.0, most=4)
    observed = Observed(10.0, 1, num_arrived=10, num_prompt_tokens=4000)
    assert scaler.target(observed) == 4
    assert scaler.expected_violations(4) == 1.0


def test_a_goal_for_the_time_between_tokens_alone_is_enough() -> None:
    model = replica_model(CONFIG, FakeReplicas().status)
    assert model is not None
    busy = Observed(100.0, 1, (), 600, 240_000, 600, 0, 600, 60_000)
    counts = [
        GoalScaler(LatencyGoal(math.inf, tpot_s), model, start_up_s=30.0, most=64).needed(busy)
        for tpot_s in (0.5, 0.03)
    ]
    assert 1 <= counts[0] < counts[1] < 64


def test_a_request_that_goes_on_elsewhere_counts_once() -> None:
    replicas = FakeReplicas()
    own = replicas.own("a")
    replicas.load.arrived("a", 400)
    assert replicas.load.observed(0.0, 1)[-3:] == (1, 1, 400)
    for _ in range(2):
        own.deliver(Output("a", 0, token_ids=(1,)))
        replicas.load.delivered(own, 16)
    replicas.load.ended(own)
    replicas.load.ended(own)
    assert replicas.load.observed(0.0, 1) == Observed(0.0, 1, (), 1, 400, 1, 16, 1, 2)


def test_ranges() -> None:
    assert [RANGE(text) for text in ("3", "2-8", "2-2")] == [3, (2, 8), 2]
    assert ServerConfig(replicas=(2, 8)).replicas == (2, 8)
    for wrong in ((8, 2), (0, 2), (1, 2, 3), (1, 9999)):
        with pytest.raises(ConfigError):
            ServerConfig(replicas=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="need a latency goal"):
        goal_of(None, None, (1, 2))
    assert goal_of(None, 0.1, (1, 2)) == LatencyGoal(math.inf, 0.1)
    assert goal_of(1.5, None, (1, 2)) == LatencyGoal(1.5)
