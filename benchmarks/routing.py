"""Routers compared over a simulated fleet: share of prompts that is cached, and time to first token.

    python benchmarks/routing.py                      both traces, 2, 4 and 16 replicas, 0.3, 0.6 and 0.9 of
                                                      the load at which replicas in turns are saturated
    python benchmarks/routing.py --trace mooncake --replicas 4 --loads 0.6 --requests 500
    python benchmarks/routing.py --map                the memory of a block map, and the time of its calls

The requests of `mooncake_synthetic` share prefixes (its hash ids become tokens), those of Azure's
conversations do not. Lengths are full. Replicas are engines on virtual clocks, with the steps of a model of
8 billion parameters on one accelerator of 600 TFLOP/s and 3 TB/s and a KV cache of 40 GB. The oracle knows
every cache and sends each prompt where most of it is, whatever the queue there.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.bench.report import columns
from quire.bench.workload import Arrival, Request, read_trace, trace_requests
from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.engine.status import HASH_PREFIX_BYTES, CacheChanges, StepReport
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.routing.block_map import BlockMap
from quire.routing.policies import PrefixOracle, RoundRobin, TwoChoices
from quire.routing.prefix_router import PrefixRouter
from quire.routing.router import Ask, Router
from quire.simulation.clients import NO_BOUNDS, NO_DELAYS, Clients
from quire.simulation.fleet import Fleet, FleetPlan
from quire.simulation.prompts import BlockVocabulary

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
FILES = {"mooncake": "mooncake_synthetic_trace.jsonl.gz", "azure": "AzureLLMInferenceTrace_conv.csv.gz"}
FEATURES = (*LEADING, Feature("positions"), Feature("pairs"))
# Seconds: 16 GB of weights and 131 kB of keys and values a position; 16 GFLOP a token and 0.5 MFLOP a pair.
STAGES = (
    Stage((5.3e-3, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 2.7e-5, 0.0, 0.0, 0.0)),
    Stage((0.0, 0.0, 0.0, 0.0, 4.4e-8, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0, 0.9e-9)),
)
LAW = StepLaw(FEATURES, STAGES, (5e-4, 1e-5, 0.0, 0.0, 0.0, 0.0), STAGES, host_s=2e-4)
CONFIG = EngineConfig(block_size=64, max_num_batched_tokens=2048, max_num_seqs=64)
NUM_BLOCKS = 300_000 // CONFIG.block_size
LONGEST = 200_000  # tokens
ROUTERS = ("round robin", "two choices", "prefix", "oracle")


class Found(NamedTuple):
    """The outcome of a run."""

    cached_share: float
    ttft_s: tuple[float, ...]  # sorted
    busy_s: float  # of all devices
    routing_s: float  # of the processor, for each choice

    def quantile(self, share: float) -> float:
        return self.ttft_s[min(int(share * len(self.ttft_s)), len(self.ttft_s) - 1)]


def scheduler() -> Scheduler:
    return Scheduler(
        groups=[BlockGroup(NUM_BLOCKS)],
        block_size=CONFIG.block_size,
        max_num_seqs=CONFIG.max_num_seqs,
        max_num_batched_tokens=CONFIG.max_num_batched_tokens,
        max_model_len=LONGEST,
    )


def requests(trace: Sequence[Arrival], rate: float) -> Iterator[Request]:
    """Yield the requests of a trace, at so many a second."""
    begin_s = trace[0].at_s
    speed = rate * (trace[-1].at_s - begin_s) / len(trace)
    moved = (replace(one, at_s=one.at_s - begin_s) for one in trace)
    return trace_requests(moved, BlockVocabulary(), "", speed=speed, longest=LONGEST)


def simulate(trace: Sequence[Arrival], rate: float, num_replicas: int, name: str) -> Found:
    """Run a load over replicas behind a router."""
    fleets: list[Fleet] = []

    def find(replica: int, hashes: Sequence[bytes]) -> int:
        pool = fleets[0].replicas[replica].engine.scheduler.caches.whole[0]
        return next((i for i, one in enumerate(hashes) if pool.find(one) is None), len(hashes))

    makers: dict[str, Callable[[], Router]] = {
        "round robin": RoundRobin,
        "two choices": TwoChoices,
        "prefix": partial(PrefixRouter, CONFIG),
        "oracle": partial(PrefixOracle, find),
    }
    router = makers[name]()
    clients = Clients(requests(trace, rate), NO_DELAYS, NO_BOUNDS)
    fleets.append(Fleet(FleetPlan(num_replicas=num_replicas), clients, scheduler, LAW, router))
    choose, spent_s = router.choose, 0.0

    def timed(*args):  # type: ignore[no-untyped-def]
        nonlocal spent_s
        begin_s = time.process_time()
        try:
            return choose(*args)
        finally:
            spent_s += time.process_time() - begin_s

    router.choose = timed  # type: ignore[method-assign]
    fleets[0].run()
    ended = clients.timelines
    cached = sum(one.num_cached_tokens for one in ended) / sum(one.num_prompt_tokens for one in ended)
    ttft_s = tuple(sorted(one.ttft_s for one in ended if one.ttft_s is not None))
    return Found(cached, ttft_s, sum(one.runner.busy_s for one in fleets[0].replicas), spent_s / len(ended))


def compare(
    name: str, first: int, num_requests: int, replicas: Sequence[int], loads: Sequence[float]
) -> None:
    """Print a table for a trace."""
    trace = list(islice(read_trace(TRACES / FILES[name]), first, first + num_requests))
    rows = [
        [
            "trace",
            "replicas",
            "load",
            "router",
            "cached",
            "of oracle",
            "TTFT p50",
            "p90",
            "p99",
            "p90 vs best",
            "choice",
        ]
    ]
    for num_replicas in replicas:
        quiet = simulate(trace, 0.2 * num_replicas, num_replicas, "round robin")
        saturated = num_replicas * len(trace) / quiet.busy_s
        for load in loads:
            found = {one: simulate(trace, load * saturated, num_replicas, one) for one in ROUTERS}
            best = min(found["round robin"].quantile(0.9), found["two choices"].quantile(0.9))
            for router, one in found.items():
                of_oracle = (
                    one.cached_share / found["oracle"].cached_share if found["oracle"].cached_share else 1.0
                )
                ttft = [f"{1e3 * one.quantile(share):,.0f} ms" for share in (0.5, 0.9, 0.99)]
                row = [
                    name,
                    str(num_replicas),
                    f"{load:g}",
                    router,
                    f"{one.cached_share:.1%}",
                    f"{of_oracle:.1%}",
                ]
                rows.append(
                    [*row, *ttft, f"{one.quantile(0.9) / best - 1:+.1%}", f"{1e6 * one.routing_s:.0f} µs"]
                )
            print(columns([rows[0], *rows[-len(ROUTERS) :]]), flush=True)


def measure_map() -> None:
    """Print the memory of a million pairs, and microseconds of the processor for lookups and choices."""
    dice = np.random.default_rng(1)
    keys = dice.integers(1, 2**64 - 1, 1_300_000, dtype=np.uint64)
    tracemalloc.start()
    found = BlockMap()
    for first in range(0, len(keys), 1000):  # more than fit
        found.add(first // 1000 % 8, keys[first : first + 1000])
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{len(found):,} pairs: {used / 1e6:.1f} MB, at most {peak / 1e6:.1f} MB")
    chains = [keys[first : first + 1000] for first in range(1_000_000, 1_200_000, 1000)]
    begin_s = time.process_time()
    for chain in chains:
        found.match(chain)
    print(
        f"a chain of 1,000 blocks is looked up in {1e6 * (time.process_time() - begin_s) / len(chains):.0f}"
    )
    for num_replicas, num_blocks in ((2, 20), (2, 1000), (16, 100), (1000, 100)):
        spent_us = _choice_us(num_replicas, num_blocks)
        print(f"{num_replicas} replicas, {num_blocks} blocks: {spent_us:.0f} a choice")


def _choice_us(num_replicas: int, num_blocks: int, count: int = 200) -> float:
    """Return the time of a choice for a prompt that one replica has."""
    dice, router = random.Random(1), PrefixRouter(CONFIG)
    for replica in range(num_replicas):
        router.add_replica()
        router.take_report(replica, StepReport(None, 8, 2, NUM_BLOCKS, LAW))
    asks = []
    for index in range(count):
        hashes = tuple(dice.randbytes(32) for _ in range(num_blocks))
        asks.append(Ask(str(index), hashes, num_blocks * CONFIG.block_size + 1, 0.0))
        joined = b"".join(one[:HASH_PREFIX_BYTES] for one in hashes)
        router.take_changes(index % num_replicas, CacheChanges(joined, b""))
    begin_s = time.process_time()
    for index, ask in enumerate(asks):
        router.choose(ask)
        if index >= 2:
            router.started(asks[index - 2].request_id, 0)
            router.ended(asks[index - 2].request_id)
    return 1e6 * (time.process_time() - begin_s) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", choices=[*FILES], nargs="+", default=[*FILES])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--first", type=int, default=0, help="skip so many requests of a trace")
    parser.add_argument("--requests", type=int, default=4000, help="so many of a trace")
    parser.add_argument("--map", action="store_true", help="measure the block map instead")
    args = parser.parse_args()
    if args.map:
        measure_map()
    for name in () if args.map else args.trace:
        compare(name, args.first, args.requests, args.replicas, args.loads)


if __name__ == "__main__":
    main()
