"""Published runs of vLLM in ../shared/data/perf, as loads for the simulation: requests, and their latencies.

The configuration of each run is that of its record: blocks, sequences and tokens of a step. Where a record
lacks the number of blocks, it follows from the memory of its machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.workload import Request
from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.models import read_model
from quire.program.passes import fuse
from quire.roofline.folded import FoldedCost, fold
from quire.roofline.law import law_at_the_roof
from quire.roofline.probe import Ceilings
from quire.simulation.fit import Latency, fit
from quire.simulation.shares import RoofShares, at_shares
from quire.simulation.simulate import Simulated, simulate

# Runs, and the names of their machines in hardware.json.
RUNS = {
    "vllm_RTX4090_Llama-3.1-8B": "GeForce RTX 4090",
    "vllm_RTXPRO6000_Llama-3.1-8B": "RTX PRO 6000 Blackwell Workstation Edition",
}
CONFIG = "meta-llama--Meta-Llama-3.1-8B"
ITEM_BYTES = 2  # of weights and cache: bfloat16
NUM_FITTED = 60


@dataclass(frozen=True)
class PublishedRun:
    """One run: its requests in the order of arrival, and the latency of each."""

    name: str
    settings: dict[str, Any]
    num_blocks: int
    roof: StepLaw
    requests: list[Request]
    measured: list[Latency]

    def scheduler(self) -> Scheduler:
        """Return a scheduler as vLLM was configured; vLLM keeps no spare blocks for running sequences."""
        return Scheduler(
            groups=[BlockGroup(self.num_blocks)],
            block_size=16,
            max_num_seqs=self.settings["max_num_seqs"],
            max_num_batched_tokens=self.settings["max_num_batched_tokens"],
            max_model_len=self.settings["max_model_len"] or 131072,
            num_spare_blocks=0,
        )

    def simulate(self, shares: RoofShares, num_first: int | None = None) -> Simulated:
        """Simulate the run at these shares of the roof, or until its first requests have ended."""
        law = at_shares(self.roof, shares)
        return simulate(self.scheduler(), law, self.requests, num_first=num_first)

    def fit(self, count: int = NUM_FITTED) -> RoofShares:
        """Fit the shares to the latencies of the first requests."""
        return fit([self.measured[:count]], lambda shares: [self._first(shares, count)])

    def _first(self, shares: RoofShares, count: int) -> list[Latency]:
        return [Latency.of(one) for one in self.simulate(shares, count).timelines[:count]]


def read_run(data: Path, name: str) -> PublishedRun:
    """Read a run of the folder ../shared/data."""
    folder = data / "perf" / name
    lines = (folder / "requests.jsonl").read_text("utf-8").splitlines()
    entries = sorted(map(json.loads, lines), key=lambda entry: entry["queued_ts"])
    begin_s = entries[0]["queued_ts"]
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    folded = _folded(data)
    weight_bytes = folded.cost([(0, 1)], 1).weight_bytes
    return PublishedRun(
        name,
        meta["engine_kwargs"],
        meta.get("kv_cache", {}).get("num_gpu_blocks") or _num_blocks(folder, data, weight_bytes),
        law_at_the_roof(folded, _ceilings(data, RUNS[name]), {}),
        [
            Request([index + 1] * entry["input_toks"], entry["output_toks"], entry["queued_ts"] - begin_s)
            for index, entry in enumerate(entries)
        ],
        [
            Latency(
                entry["first_token_ts"] - entry["queued_ts"],
                (entry["last_token_ts"] - entry["first_token_ts"]) / (entry["output_toks"] - 1),
            )
            for entry in entries
        ],
    )


def _folded(data: Path) -> FoldedCost:
    raw = json.loads((data / "configs" / CONFIG / "config.json").read_text("utf-8"))
    program = fuse(read_model(raw).program)
    return fold(
        program,
        lambda weight: weight.size * ITEM_BYTES,
        kv_itemsize=ITEM_BYTES,
        arithmetic=lambda op: "bf16",
    )


def _ceilings(data: Path, machine: str) -> Ceilings:
    """Return the peaks of a data sheet in the form of measured ceilings."""
    devices = json.loads((data / "perf" / "hardware.json").read_text("utf-8"))["devices"]
    entry = next(entry for entry in devices if entry["name"] == machine)
    rates = dict.fromkeys(("bf16", "f32"), entry["peak_dense_tflops"]["bf16"] * 1000000000000.0)
    return Ceilings(machine, "", 1, rates, {1: {"memory": entry["memory_bandwidth_gb_s"] * 1e9}}, 0.0)


def _num_blocks(folder: Path, data: Path, weight_bytes: float) -> int:
    """Return the blocks that fit beside the weights, by the machine in cluster.json."""
    cluster = json.loads((folder / "cluster.json").read_text("utf-8"))
    memory = cluster["nodes"][0]["instances"][0]["npu_mem"]
    raw = json.loads((data / "configs" / CONFIG / "config.json").read_text("utf-8"))
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    token_bytes = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * head_dim * ITEM_BYTES
    return int((memory["mem_size"] * 1e9 * memory["mem_util"] - weight_bytes) / (16 * token_bytes))
