"""Several engines in processes of their own, for tests, behind a router that takes turns."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from remote_engines import LIMIT_S, NULL, QUICK, until

from quire.cluster.autoscaling import Autoscaler
from quire.cluster.placement import Core, Place
from quire.cluster.replicas import Replicas
from quire.config import EngineConfig
from quire.engine.status import CacheChanges, StepReport
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.routing.router import Ask, Candidate, Decision, Health
from quire.server.remote import RemoteEngine

ROOF = (Stage((0.020, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 0.001, 0.0, 0.0)),)
LAW = StepLaw((*LEADING, Feature("positions")), ROOF, (0.001, 0.0, 0.0, 0.0, 0.0), ROOF)


class Turns:
    """A Router that sends requests to each replica in turn, and keeps what it was told."""

    def __init__(self) -> None:
        self.health: dict[int, Health] = {}
        self.asks: list[Ask] = []
        self.open: dict[str, int] = {}  # requests and their replicas
        self.begun: list[tuple[str, int]] = []  # requests with an output, and their cached tokens
        self.num_reports = 0

    def add_replica(self) -> int:
        self.health[len(self.health)] = "ready"
        return len(self.health) - 1

    def set_health(self, replica: int, health: Health) -> None:
        assert self.health[replica] not in ("gone", health)
        self.health[replica] = health

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        assert among
        assert ask.request_id not in self.open
        self.asks.append(ask)
        chosen = among[(len(self.asks) - 1) % len(among)]
        self.open[ask.request_id] = chosen
        candidates = tuple(Candidate(one, 0, 0.0, self.health[one]) for one in among)
        return Decision(chosen, candidates, "unknown")

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        assert request_id in self.open
        self.begun.append((request_id, num_cached_tokens))

    def ended(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def take_report(self, replica: int, report: StepReport) -> None:
        assert self.health[replica] != "gone"
        self.num_reports += 1

    def take_changes(self, replica: int, changes: CacheChanges) -> None:
        raise AssertionError("reports have the changes")


def places(count: int) -> list[Place]:
    """Places without processors: their engines run anywhere."""
    return [Place((Core((), 0),)) for _ in range(count)]


@asynccontextmanager
async def replicas(
    count: int = 2,
    config: EngineConfig = NULL,
    drain_s: float = LIMIT_S,
    autoscaler: Autoscaler | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Replicas, Turns]]:
    """So many replicas. Options are those of RemoteEngine."""
    router = Turns()

    def make(place: Place) -> RemoteEngine:
        return RemoteEngine(config, **{"policy": QUICK, **options})

    several = Replicas(
        make,
        places(count),
        router,
        block_size=config.block_size,
        drain_s=drain_s,
        autoscaler=autoscaler,
    )
    try:
        await several.start()
        yield several, router
    finally:
        await asyncio.wait_for(several.close(), LIMIT_S)


async def operation(several: Replicas) -> None:
    """Wait for the operation that runs, which must succeed."""
    last = several.operations.last
    assert last is not None
    while last.seconds is None:
        await asyncio.sleep(0.005)
    assert last.error is None


async def kill(several: Replicas, number: int, state: str) -> None:
    """Kill the engine of a replica, and wait until it is in this state."""
    pid = several.statuses[number].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: several.statuses[number].state == state)
