"""Simulate a load on a fleet, and sum up what the replicas did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.config import EngineConfig
from quire.engine.budget import Budget
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.goals import Goal
from quire.routing.goal_scaler import LatencyGoal, ReplicaModel
from quire.routing.policies import PrefixOracle, RoundRobin, TwoChoices
from quire.routing.prefix_router import PrefixRouter
from quire.routing.router import Router
from quire.simulation.clients import NO_BOUNDS, NO_DELAYS, Bounds, Clients, Delays
from quire.simulation.fleet import Choice, Fleet, FleetPlan, ReplicaCounts

ROUTERS = ("prefix", "round-robin", "two-choices", "oracle")


class ReplicaLife(NamedTuple):
    """When a replica was started, took requests, and was gone, at the latest at the end of the run."""

    started_s: float
    ready_s: float
    gone_s: float
    has_died: bool


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The outcome of a load on a fleet. Times are of the virtual clock, in seconds from its start.

    `replica_s` is the time of all replicas together, from the start of each until it was gone.
    `num_without_affinity` counts decisions that took no account of cached blocks, by reason.
    `lives` are those of replicas that were ready, as the router numbers them, and `choices` the router's: the
    id of a request is its place among `timelines`.
    """

    timelines: list[Timeline]
    end_s: float
    counts: list[ReplicaCounts]
    replica_s: float
    busy_s: float
    num_steps: int
    num_preemptions: int
    num_deaths: int
    num_resumed: int
    num_without_affinity: Counter[str]
    lives: list[ReplicaLife]
    choices: list[Choice]

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that were cached."""
        num_prompt = sum(one.num_prompt_tokens for one in self.timelines)
        return sum(one.num_cached_tokens for one in self.timelines) / max(num_prompt, 1)

    def violated_share(self, goal: Goal) -> float:
        """Return the share of requests that did not keep a goal."""
        return sum(not one.keeps(goal) for one in self.timelines) / max(len(self.timelines), 1)


def make_router(name: str, config: EngineConfig, find: Callable[[int, Sequence[bytes]], int]) -> Router:
    """Return one of ROUTERS. `find` counts the leading blocks of a chain that a replica has cached."""
    if name == "prefix":
        return PrefixRouter(config)
    if name == "oracle":
        return PrefixOracle(find)
    return RoundRobin() if name == "round-robin" else TwoChoices()


def replica_model(config: EngineConfig, law: StepLaw, scheduler: Scheduler) -> ReplicaModel:
    """Return what a scaler predicts replicas with such a scheduler by."""
    budget = Budget(config.max_num_batched_tokens, config.max_num_prefill_tokens, config.itl_goal)
    pools = [pool.num_blocks for pool in scheduler.caches.whole]
    num_tokens = min(pools, default=1 << 30) * scheduler.block_size
    budget.law = law
    return ReplicaModel(law, budget, scheduler.max_num_seqs, num_tokens)


def latency_goal(goal: Goal) -> LatencyGoal | None:
    """Return the limits of a goal that a scaler looks at, None without one for the first token."""
    limits = {one.measure: one.limit_ms / 1e3 for one in goal.limits}
    tpot_s = min([limits[name] for name in ("itl", "tpot") if name in limits], default=0.0)
    return LatencyGoal(limits["ttft"], tpot_s) if "ttft" in limits else None


def simulate_fleet(
    plan: FleetPlan,
    router: str,
    config: EngineConfig,
    scheduler: Callable[[], Scheduler],
    law: StepLaw,
    requests: Iterable[Request],
    *,
    delays: Delays = NO_DELAYS,
    bounds: Bounds = NO_BOUNDS,
    is_open: bool = True,
) -> SimulatedFleet:
    """Run a load on a fleet until all its requests have ended.

    `config` is that of the replicas, and `scheduler` makes the scheduler of each. Otherwise as in `simulate`.
    """
    fleet: Fleet | None = None

    def find(replica: int, hashes: Sequence[bytes]) -> int:
        assert fleet is not None
        return fleet.find(replica, hashes)

    clients = Clients(requests, delays, bounds, is_open=is_open)
    fleet = Fleet(plan, clients, scheduler, law, make_router(router, config, find))
    fleet.run()
    end_s = max((one.end_s for one in clients.timelines), default=0.0)
    by_number = sorted((one for one in fleet.replicas if one.number >= 0), key=lambda one: one.number)
    return SimulatedFleet(
        clients.timelines,
        end_s,
        fleet.log.counts,
        sum([max(0.0, min(one.gone_s, end_s) - one.started_s) for one in fleet.replicas]),
        sum([one.runner.busy_s for one in by_number]),
        sum([one.num_steps for one in by_number]),
        sum([one.engine.scheduler.num_preemptions for one in by_number]),
        fleet.log.num_deaths,
        fleet.log.num_resumed,
        fleet.log.num_without_affinity,
        [ReplicaLife(one.started_s, one.ready_s, min(one.gone_s, end_s), one.has_died) for one in by_number],
        fleet.log.choices,
    )
