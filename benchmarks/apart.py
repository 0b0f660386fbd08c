"""When prefill apart from decode pays: goodput of P + D replicas over that of P + D replicas that do both.

    python benchmarks/apart.py [--settings h100-azure h100-mooncake cpu-azure]

Goodput is the highest rate of requests at which at least 90% of them keep the goal: the arrivals of a trace,
sent faster and faster. Replicas that do both are tried with several --max-num-prefill-tokens, and count with
the best. Everything is simulated: 4 replicas of Llama 3.1 8B on H100 at typical shares of its peaks, with
links of 400 Gbit/s, or of Qwen3 1.7B in int8 on two cores by fixed ceilings, with 10 Gbit/s.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from quire.bench.workload import Arrival, read_trace, trace_requests
from quire.config import EngineConfig
from quire.engine.step_law import StepLaw
from quire.goals import Goal
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.roofline.probe import Ceilings
from quire.simulation.apart import Apart
from quire.simulation.fleet import FleetPlan
from quire.simulation.fleet_run import SimulatedFleet, simulate_fleet
from quire.simulation.model import SimulatedModel
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.shares import RoofShares, at_shares

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
AZURE = DATA / "traces" / "AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = DATA / "traces" / "mooncake_synthetic_trace.jsonl.gz"
OPERATIONS = {"int8": 935e9, "bf16": 470e9, "f32": 236e9}
CEILINGS = Ceilings("2 cores", "avx512_vnni_bf16", 2, OPERATIONS, {2: {"memory": 33e9}}, 0.0)
SHARES = RoofShares(0.75, 0.7, step_s=1e-3, row_s=1e-4)
NUM_REPLICAS, KEPT_SHARE = 4, 0.9
FACTOR, STEPS = 1.1, 16  # rates that are tried: from a fifth of a setting's to four times it


@dataclass(frozen=True)
class Setting:
    """Replicas, a load, and what is tried."""

    machine: str | None
    model: str
    trace: Path
    count: int
    gbit: float
    goals: tuple[str, ...]
    chunks: tuple[int, ...]
    rate: float
    longest: int

    def config(self, chunk: int) -> EngineConfig:
        """Return the configuration of replicas that compute that many tokens of prompts beside decoding."""
        config = EngineConfig(model=str(DATA / "configs" / self.model), max_num_prefill_tokens=chunk)
        if self.machine:
            return replace(config, max_num_seqs=128, max_model_len=self.longest)
        cache = {"max_model_len": self.longest, "kv_cache_memory_bytes": 8 << 30}
        return replace(config, quantization="int8", max_num_seqs=16, **cache)

    def load(self) -> list[Arrival]:
        """Return the requests."""
        trace = [one for one in read_trace(self.trace) if _length(one) < self.longest][: self.count]
        return [replace(one, at_s=one.at_s - trace[0].at_s) for one in trace]


def _length(one: Arrival) -> int:
    return one.num_prompt_tokens + one.num_output_tokens


LLAMA, QWEN = "meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen3-1.7B"
SETTINGS = {
    "h100-azure": Setting(
        "H100 SXM",
        LLAMA,
        AZURE,
        700,
        400.0,
        ("ttft<1s,tpot<50ms", "ttft<500ms,tpot<20ms", "ttft<500ms,tpot<12ms"),
        (256, 512),
        70.0,
        16384,
    ),
    "h100-mooncake": Setting(
        "H100 SXM",
        LLAMA,
        MOONCAKE,
        200,
        400.0,
        ("ttft<5s,tpot<50ms", "ttft<3s,tpot<20ms", "ttft<3s,tpot<12ms"),
        (256, 512),
        8.0,
        65536,
    ),
    "cpu-azure": Setting(
        None,
        QWEN,
        AZURE,
        400,
        10.0,
        ("ttft<30s,tpot<500ms", "ttft<30s,tpot<250ms", "ttft<30s,tpot<150ms"),
        (16, 64),
        0.4,
        16384,
    ),
}


class Arm:
    """Replicas of a setting: the load at any rate, each simulated once."""

    def __init__(self, setting: Setting, chunk: int, num_prefill: int) -> None:
        self._setting, self._config, self._trace = setting, setting.config(chunk), setting.load()
        self._model, self._law = _model(self._config, setting.machine)
        gbit, token_bytes = setting.gbit, self._model.kv_token_bytes
        apart = Apart(num_prefill, token_bytes, gbit * 1e9 / 8) if num_prefill else None
        self._plan = FleetPlan(num_replicas=NUM_REPLICAS, apart=apart, num_records=1)
        self._done: dict[float, SimulatedFleet] = {}

    def at(self, rate: float) -> SimulatedFleet:
        """Return what becomes of the load at a rate of requests a second."""
        if rate not in self._done:
            speed, longest = rate * self._trace[-1].at_s / len(self._trace), self._setting.longest
            requests = trace_requests(self._trace, BlockVocabulary(), "", speed=speed, longest=longest)
            law, model = self._law, self._model
            self._done[rate] = simulate_fleet(
                self._plan, "prefix", self._config, lambda: model.scheduler(law), law, requests
            )
        return self._done[rate]

    def goodput(self, goal: Goal) -> float:
        """Return the highest rate, in steps of FACTOR, at which enough requests keep the goal."""
        low, high = -STEPS, STEPS  # powers of FACTOR
        while high - low > 1:
            middle = (low + high) // 2
            broken = self.at(self._setting.rate * FACTOR**middle).violated_share(goal)
            low, high = (middle, high) if broken <= 1 - KEPT_SHARE else (low, middle)
        return self._setting.rate * FACTOR**low if low > -STEPS else 0.0

    def throughput(self) -> float:
        """Return the requests that end in a second if all are sent at once."""
        return len(self._trace) / self.at(1e6).end_s


def _model(config: EngineConfig, machine: str | None) -> tuple[SimulatedModel, StepLaw]:
    model = SimulatedModel.of(config, machine)
    if machine:
        return model, model.roof()
    return model, at_shares(law_at_the_roof(fold_costs(model.description), CEILINGS, {}), SHARES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=[*SETTINGS])
    for name in parser.parse_args().settings:
        setting = SETTINGS[name]
        print(f"{name}, requests/s", *setting.goals, "all at once", sep="\t", flush=True)
        arms = [(f"{NUM_REPLICAS} do both, chunks of {chunk}", chunk, 0) for chunk in setting.chunks]
        arms += [(f"{p} + {NUM_REPLICAS - p}", setting.chunks[-1], p) for p in range(1, NUM_REPLICAS)]
        for text, chunk, num_prefill in arms:
            arm = Arm(setting, chunk, num_prefill)
            found = [arm.goodput(Goal.parse(goal)) for goal in setting.goals]
            print(text, *(f"{rate:.3g}" for rate in (*found, arm.throughput())), sep="\t", flush=True)


if __name__ == "__main__":
    main()
