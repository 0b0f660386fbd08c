"""Autoscaling: as many replicas as are predicted to keep the latency goal, asked again every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from quire.cluster.operations import Operation, Operations
from quire.config import EngineConfig
from quire.engine.budget import Budget
from quire.engine.status import EngineStatus
from quire.errors import ConfigError
from quire.routing.goal_scaler import GoalScaler, LatencyGoal, ReplicaModel
from quire.routing.scaling import Observed

INTERVAL_S = 5.0  # between two looks at the load
RETRY_S = 60.0  # after an operation that failed
START_UP_S = 60.0  # of a replica, until one has started
NUM_CHANGES = 100  # kept for whoever asks
_LOG = logging.getLogger(__name__)


class Scaled(Protocol):
    """The replicas whose number follows the load."""

    operations: Operations
    start_up_s: float  # of the replica that started last

    @property
    def status(self) -> EngineStatus:
        """The status of all together."""

    @property
    def numbers(self) -> Sequence[int]:
        """The replicas that run."""

    def observed(self, at_s: float) -> Observed:
        """Return the load at a time that counts from the start."""

    def scale(self, count: int) -> Coroutine[Any, Any, None]:
        """Let so many replicas run."""


class Change(NamedTuple):
    """A change of the number of replicas, in seconds since 1970, and why."""

    at_s: float
    before: int
    after: int
    reason: str


class Autoscaler:
    """Lets `least` to `most` replicas run, by the predicted violations of a goal. See GoalScaler.

    Its changes are operations as others are: while one runs, nothing is decided.
    """

    def __init__(self, goal: LatencyGoal, config: EngineConfig, least: int, most: int) -> None:
        self.goal, self.least, self.most = goal, least, most
        self.changes = deque[Change](maxlen=NUM_CHANGES)
        self._config = config
        self._scaler: GoalScaler | None = None
        self._failed: Operation | None = None  # the last one that did
        self._retry_at_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self, replicas: Scaled) -> None:
        """Look every few seconds from now on, until `close`."""
        self._task = asyncio.create_task(self._run(replicas), name="autoscaling")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, replicas: Scaled) -> None:
        begin_s = time.monotonic()
        while True:
            try:
                self.look(replicas, time.monotonic() - begin_s)
            except Exception:
                _LOG.exception("the number of replicas could not be decided")
            await asyncio.sleep(INTERVAL_S)

    def look(self, replicas: Scaled, at_s: float) -> None:
        """Observe the load, and begin to change the number of replicas if the goal needs it.

        Without a law of steps nothing is known of any number, and nothing changes.
        """
        if (model := replica_model(self._config, replicas.status)) is None:
            return
        scaler = self._scaler = self._scaler or GoalScaler(
            self.goal, model, start_up_s=START_UP_S, most=self.most, interval_s=INTERVAL_S
        )
        scaler.model, scaler.start_up_s = model, replicas.start_up_s or START_UP_S
        observed = replicas.observed(at_s)
        count = min(max(scaler.target(observed), self.least), self.most)
        before = len(replicas.numbers)
        if count == before or not self._may_begin(replicas.operations.last, at_s):
            return
        reason = _reason(scaler, observed, before, count)
        self.changes.append(Change(time.time(), before, count, reason))
        replicas.operations.begin(f"scaling from {before} to {count}: {reason}", replicas.scale(count))

    def _may_begin(self, last: Operation | None, at_s: float) -> bool:
        """Return False while an operation runs, and for RETRY_S after one was seen to have failed."""
        if last is None:
            return True
        if last.error is not None and last is not self._failed:
            self._failed, self._retry_at_s = last, at_s + RETRY_S
        return last.seconds is not None and at_s >= self._retry_at_s


def goal_of(ttft_goal_s: float | None, itl_goal_s: float | None, replicas: tuple[int, int]) -> LatencyGoal:
    """Return the goal that a number of replicas is decided by. Raises ConfigError without any."""
    if ttft_goal_s is None and itl_goal_s is None:
        words = f"replicas from {replicas[0]} to {replicas[1]} need a latency goal to be scaled by"
        raise ConfigError(words, "give ttft_goal or itl_goal, or one number of replicas")
    return LatencyGoal(ttft_goal_s or math.inf, itl_goal_s or 0.0)


def replica_model(config: EngineConfig, status: EngineStatus) -> ReplicaModel | None:
    """Return what a replica's times are predicted by, None before the law of its steps is known."""
    law = status.law or status.facts.law
    if law is None:
        return None
    budget = Budget(config.max_num_batched_tokens, config.max_num_prefill_tokens, config.itl_goal)
    budget.law = law
    limits = status.facts.limits
    pools = [group.num_blocks for group in limits.groups if group.window is None]
    return ReplicaModel(law, budget, config.max_num_seqs, min(pools, default=1 << 30) * limits.block_size)


def _reason(scaler: GoalScaler, observed: Observed, before: int, after: int) -> str:
    shares = [f"{scaler.expected_violations(count):.1%} of requests by {count}" for count in (before, after)]
    return (
        f"predicted to break the goal: {', '.join(shares)}; {scaler.expected_rate:.3g} requests a second, "
        f"{observed.num_open} open, {observed.num_queued} of them waiting"
    )
