"""Simulated fleets: how fast they are simulated, routers side by side, and scalers on equal terms.

    python benchmarks/fleet.py --speed     1,000 replicas and 6,500 conversations of Azure: 1.5 M tokens of
                                           answers, those of prompts not counted; by --router
    python benchmarks/fleet.py --scaling   violations of a goal over replica-hours: the scaler by the goal,
                                           and the one by queue length at several settings; on every sixth
                                           conversation of the trace, and on bursts

The replicas of --speed are those of Llama 3.1 8B on an L40S at typical shares of its peaks. Those of
--scaling are 2 cores that serve Qwen3 1.7B in int8, by fixed ceilings, so that figures do not depend on the
machine. Times of simulating are CPU times of this process.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quire.bench.report import columns
from quire.bench.workload import Arrival, Request, read_trace, trace_requests
from quire.config import EngineConfig
from quire.engine.step_law import StepLaw
from quire.goals import Goal
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.roofline.probe import Ceilings
from quire.routing.goal_scaler import GoalScaler
from quire.routing.scaling import QueueLengthScaler, Scaler
from quire.simulation.fleet import FleetPlan
from quire.simulation.fleet_run import (
    ROUTERS,
    SimulatedFleet,
    latency_goal,
    replica_model,
    simulate_fleet,
)
from quire.simulation.model import SimulatedModel
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.shares import RoofShares, at_shares

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACE = DATA / "traces" / "AzureLLMInferenceTrace_conv.csv.gz"
OPERATIONS = {"int8": 935e9, "bf16": 470e9, "f32": 236e9}
CEILINGS = Ceilings("2 cores", "avx512_vnni_bf16", 2, OPERATIONS, {2: {"memory": 33e9}}, 0.0)
SHARES = RoofShares(0.75, 0.7, step_s=1e-3, row_s=1e-4)
GOAL = Goal.parse("ttft<30s,tpot<500ms")
START_UP_S, LONGEST, EVERY = 60.0, 16384, 6
LOW, HIGH = 0.5, 1.5  # requests a second, between bursts and in them
CALM_S, BURST_S, BURSTS_S = 240.0, 90.0, 3500.0  # mean time between bursts, their length, the whole
# Open requests for each replica, and seconds until fewer replicas are wanted
QUEUE_LENGTHS = ((4, 300.0), (5, 300.0), (6, 600.0), (7, 600.0), (9, 600.0))


def speed(count: int, num_replicas: int, router: str) -> None:
    """Print how long a fleet takes to simulate."""
    model = DATA / "configs" / "meta-llama--Meta-Llama-3.1-8B"
    config = EngineConfig(model=str(model), max_num_seqs=64, max_num_prefill_tokens=512)
    setting = SimulatedModel.of(config, "L40S")
    law, trace = setting.roof(), read_trace(TRACE)[:count]
    begin_s = time.process_time()
    requests = trace_requests(trace, BlockVocabulary(), "", speed=float(num_replicas), longest=None)
    plan = FleetPlan(num_replicas=num_replicas, num_records=1)
    done = simulate_fleet(plan, router, config, lambda: setting.scheduler(law), law, requests)
    took_s = time.process_time() - begin_s
    tokens = sum(one.num_output_tokens for one in done.timelines)
    prompts = sum(one.num_prompt_tokens for one in done.timelines)
    print(
        f"{num_replicas:,} replicas, {router}: {count:,} conversations with {tokens:,} tokens of answers and "
        f"{prompts:,} of prompts, {done.num_steps:,} steps, {done.end_s:.0f} s, simulated in {took_s:.1f} s"
    )


def _azure() -> list[Arrival]:
    return read_trace(TRACE)[::EVERY]


def _bursts() -> list[Arrival]:
    """Return conversations of the trace that arrive at random, at times three times as fast."""
    dice = random.Random(0)

    def arrivals() -> Iterator[Arrival]:
        at_s, end_s, bursting = 0.0, dice.expovariate(1 / CALM_S), False
        for one in read_trace(TRACE)[::EVERY]:
            at_s += dice.expovariate(HIGH if bursting else LOW)
            if at_s > end_s:
                bursting = not bursting
                end_s = at_s + (BURST_S if bursting else dice.expovariate(1 / CALM_S))
            if at_s > BURSTS_S:
                return
            yield replace(one, at_s=at_s)

    return list(arrivals())


def _replicas() -> tuple[SimulatedModel, StepLaw]:
    config = EngineConfig(
        model=str(DATA / "configs" / "Qwen--Qwen3-1.7B"),
        quantization="int8",
        max_num_seqs=16,
        max_num_prefill_tokens=64,
        max_model_len=LONGEST,
        kv_cache_memory_bytes=8 << 30,
    )
    setting = SimulatedModel.of(config, None)
    return setting, at_shares(law_at_the_roof(fold_costs(setting.description), CEILINGS, {}), SHARES)


def scaling(loads: list[str]) -> None:
    """Print violations and replica-hours of both scalers."""
    setting, law = _replicas()
    goal = latency_goal(GOAL)
    assert goal is not None
    model = replica_model(setting.config, law, setting.scheduler(law))

    def run(requests: list[Request], scaler: Scaler) -> SimulatedFleet:
        plan = FleetPlan(num_replicas=8, start_up_s=START_UP_S, scaler=scaler, most=40, num_records=1)
        return simulate_fleet(plan, "prefix", setting.config, lambda: setting.scheduler(law), law, requests)

    for load in loads:
        trace = _azure() if load == "azure" else _bursts()
        requests = list(trace_requests(trace, BlockVocabulary(), "", speed=1.0, longest=LONGEST))
        scalers: dict[str, Scaler] = {"goal": GoalScaler(goal, model, start_up_s=START_UP_S)}
        for length, down_s in QUEUE_LENGTHS:
            scalers[f"{length} open a replica, down after {down_s:g} s"] = QueueLengthScaler(
                length, interval_s=5.0, look_back_s=15.0, up_delay_s=0.0, down_delay_s=down_s
            )
        rows = [[load, "replica-hours", f"broke {GOAL}", "TTFT p99 s", "most replicas"]]
        for name, scaler in scalers.items():
            done = run(requests, scaler)
            late = sorted(one.ttft_s or 0.0 for one in done.timelines)[int(0.99 * len(done.timelines))]
            most = max(one.num_ready for one in done.counts)
            share = done.violated_share(GOAL)
            rows.append([name, f"{done.replica_s / 3600:.2f}", f"{share:.2%}", f"{late:.1f}", str(most)])
        print(columns(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=6500)
    parser.add_argument("--router", default="prefix", choices=ROUTERS)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--loads", nargs="+", default=["azure", "bursts"], choices=["azure", "bursts"])
    options = parser.parse_args()
    if options.speed:
        speed(options.requests, options.replicas, options.router)
    if options.scaling:
        scaling(options.loads)


if __name__ == "__main__":
    main()
