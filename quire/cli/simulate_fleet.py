"""The run of `quire simulate` with several replicas: one simulation for each router, and the report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.bench import report
from quire.bench.driver import LoadRun
from quire.bench.metrics import summarize
from quire.cli.fleet_report import as_json, charts, comparison, history
from quire.environment import user_path
from quire.goals import Goal
from quire.plots import page, preformatted, svg
from quire.routing.goal_scaler import GoalScaler
from quire.routing.scaling import QueueLengthScaler, Scaler
from quire.simulation.apart import GBIT_PER_S, Apart
from quire.simulation.fleet import FleetPlan
from quire.simulation.fleet_run import SimulatedFleet, latency_goal, replica_model, simulate_fleet
from quire.simulation.law_file import KnownLaw

if TYPE_CHECKING:
    from quire.simulation.model import SimulatedModel

START_UP_S, OPEN_PER_REPLICA = 60.0, 4.0
Run = Callable[[FleetPlan, str], SimulatedFleet]


def plan_of(
    args: argparse.Namespace, setting: SimulatedModel, known: KnownLaw, num_prefill: int = 0
) -> FleetPlan:
    """Return the plan that the flags describe. `num_prefill` replicas compute prompts only."""
    least, most = args.autoscale or (1, 1)
    start_up_s = START_UP_S if args.start_up is None else args.start_up
    return FleetPlan(
        num_replicas=args.replicas or least,
        start_up_s=start_up_s,
        deaths_s=args.fail or (),
        seed=args.seed or 0,
        scaler=_scaler(args, setting, known, start_up_s) if args.autoscale else None,
        least=least,
        most=most,
        apart=Apart(num_prefill, setting.kv_token_bytes, bytes_per_s=(args.link_gbit or GBIT_PER_S) * 1e9 / 8)
        if num_prefill
        else None,
        num_records=1,
    )


def _scaler(args: argparse.Namespace, setting: SimulatedModel, known: KnownLaw, start_up_s: float) -> Scaler:
    if args.scaler == "queue-length":
        return QueueLengthScaler(args.open_per_replica or OPEN_PER_REPLICA)
    goal = latency_goal(args.goal)
    assert goal is not None
    model = replica_model(setting.config, known.law, setting.scheduler(known.law))
    return GoalScaler(goal, model, start_up_s=start_up_s, most=args.autoscale[1])


def run_fleet(
    args: argparse.Namespace,
    setting: SimulatedModel,
    known: KnownLaw,
    settings: dict[str, Any],
    simulated: Run,
) -> int:
    """Simulate, print the report, and write files. Returns 1 if no request succeeded."""
    goal: Goal = args.goal or Goal()
    found: dict[str, SimulatedFleet] = {}
    begin_s = time.perf_counter()
    for router in args.router or ["prefix"]:
        for count in args.prefill_replicas or [0]:
            name = f"{router}, {count} + {args.replicas - count}" if count else router
            found[name] = simulated(plan_of(args, setting, known, count), router)
    took_s = time.perf_counter() - begin_s
    name, done = next(iter(found.items()))
    whole = LoadRun(0.0, done.end_s, 0.0, done.timelines)
    num_steps = sum(one.num_steps for one in found.values())
    where = f" on {setting.plan.machine.name}" if setting.plan else ""
    parts = [
        f"{setting.config.model}{where}, simulated: {num_steps:,} steps in {took_s:.1f} s\n"
        f"law of steps: {known.source}",
        report.text(whole, goal).rstrip() if len(found) == 1 else comparison(found, goal),
        history(done),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if args.json:
        figures = report.as_json(whole, goal, settings, bool(args.save_detailed))
        figures["fleet"] = {"router": name, **as_json(done, goal)}
        figures["routers"] = {
            one: summarize(other.timelines, other.end_s, goal).figures() | as_json(other, goal)
            for one, other in found.items()
        }
        report.write_json(user_path(args.json), figures)
    if args.html:
        shown = page("Simulated replicas", [preformatted(text), *map(svg, charts(found, goal))])
        user_path(args.html).write_text(shown, "utf-8")
    return 0 if any(not one.error for one in done.timelines) else 1


def simulated_by(
    setting: SimulatedModel, known: KnownLaw, requests: Callable[[], Any], **options: Any
) -> Run:
    """Return what simulates a load on a fleet."""

    def run(plan: FleetPlan, router: str) -> SimulatedFleet:
        return simulate_fleet(
            plan,
            router,
            setting.config,
            lambda: setting.scheduler(known.law),
            known.law,
            requests(),
            delays=known.delays,
            **options,
        )

    return run
