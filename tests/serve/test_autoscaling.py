"""Autoscaling of engines in processes of their own, by a scripted load on a fake clock."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

from remote_engines import LIMIT_S, NULL, QUICK, follow, request, run
from replica_engines import LAW, kill, operation, replicas

from quire.cluster.autoscaling import INTERVAL_S, Autoscaler
from quire.routing.goal_scaler import LatencyGoal


def test_engines_start_and_stop_with_the_load() -> None:
    """Streams that run while engines are stopped end as they would have."""

    async def check() -> None:
        scaler = Autoscaler(LatencyGoal(2.0), NULL, 1, 3)
        async with replicas(3, drain_s=0.0, autoscaler=scaler) as (several, _):
            await scaler.close()  # the machine's clock tells nothing here: the test looks
            assert several.numbers == [0]
            assert len(await follow(several.submit(request("a")))) == 16
            assert several.observed(0.0)[:2] == (0.0, 1)
            assert several.observed(0.0)[3:] == (1, 3, 1, 0, 1, 16, 0, 0, 0)
            several.all()[0].engine.status.law = LAW
            clock = itertools.count(0.0, INTERVAL_S)

            async def until(num_refused: int, reached: Callable[[], bool]) -> None:
                while not reached():
                    at_s = next(clock)
                    assert at_s < 3600, "not reached"
                    scaler.look(several, at_s)
                    several.load.refused(num_refused, 400 * num_refused)
                    if scaler.changes:
                        await asyncio.wait_for(operation(several), LIMIT_S)

            await until(100, lambda: len(several.numbers) == 3)
            assert several.observed(0.0).num_ready == 3
            streams = [several.submit(request(f"b{i}", max_tokens=200)) for i in range(6)]
            await until(0, lambda: len(several.numbers) == 1)
            assert [len(await follow(stream)) for stream in streams] == [200] * 6
            assert scaler.changes[0].before == scaler.changes[-1].after == 1

    run(check())


def test_what_was_given_up_is_replaced() -> None:
    """A replica that is not restarted any more does not count: another one is started in its place."""

    async def check() -> None:
        scaler = Autoscaler(LatencyGoal(2.0), NULL, 2, 2)
        policy = replace(QUICK, max_deaths=1)
        async with replicas(2, drain_s=0.0, autoscaler=scaler, policy=policy) as (several, _):
            await scaler.close()
            several.all()[0].engine.status.law = LAW
            scaler.look(several, 0.0)
            assert not scaler.changes
            await kill(several, 1, "stopped")
            scaler.look(several, INTERVAL_S)
            await asyncio.wait_for(operation(several), LIMIT_S)
            assert [(one.before, one.after) for one in scaler.changes] == [(1, 2)]
            assert [one.serves for one in several.all()] == [True, True]

    run(check())
