"""Routers compared over two live replicas on one machine: cached share of prompts, and time to first token.

    python benchmarks/routing_live.py CHECKPOINT                 both traces, at 0.6 of the load at which
                                                                 replicas in turns are saturated
    python benchmarks/routing_live.py CHECKPOINT --trace mooncake --loads 0.3 0.9 --rounds 5

Each run has new engines, in processes of their own with a core each, so that nothing is cached. Routers take
turns; all get the same requests at the same moments. The lengths of the traces are divided by 32, which makes
Mooncake's blocks of 512 tokens those of the engine. Times are those of the process that sends the requests.
The oracle sends each prompt where most of it is cached, whatever the queue there.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from routing import FILES, TRACES

from quire.bench.report import columns
from quire.bench.workload import Arrival, Request, read_trace, trace_requests
from quire.cluster.placement import Place, allowed_cores, divide
from quire.cluster.replicas import Replicas
from quire.config import EngineConfig
from quire.engine.status import StepReport
from quire.routing.block_map import BlockMap, keys_in, keys_of
from quire.routing.policies import PrefixOracle, RoundRobin, TwoChoices
from quire.routing.prefix_router import PrefixRouter
from quire.routing.router import Router
from quire.sampling_params import SamplingParams
from quire.server.remote import RemoteEngine
from quire.simulation.prompts import BlockVocabulary
from quire.types import NewRequest

SHORTER = 32
LONGEST = 8000  # tokens
FIRST_ID = 100  # of tokens, above those with a meaning of their own


class LiveOracle(PrefixOracle):
    """PrefixOracle over engines that report what they cache."""

    def __init__(self) -> None:
        super().__init__(lambda replica, hashes: self._map.match(keys_of(tuple(hashes))).get(replica, 0))
        self._map = BlockMap()

    def take_report(self, replica: int, report: StepReport) -> None:
        """See Router."""
        super().take_report(replica, report)
        if (changes := report.cache) is not None:
            if changes.whole:
                self._map.remove_replica(replica)
            self._map.remove(replica, keys_in(changes.evicted))
            self._map.add(replica, keys_in(changes.stored))


class Found(NamedTuple):
    """The outcome of a run."""

    cached_share: float
    ttft_s: list[float]  # sorted
    wall_s: float

    def quantile(self, share: float) -> float:
        return self.ttft_s[min(int(share * len(self.ttft_s)), len(self.ttft_s) - 1)]


def requests(trace: Sequence[Arrival], rate: float) -> list[Request]:
    """Return the requests of a trace, at so many a second, with 1/SHORTER of the lengths."""
    begin_s = trace[0].at_s
    speed = rate * (trace[-1].at_s - begin_s) / len(trace)
    moved = (replace(one, at_s=one.at_s - begin_s) for one in trace)
    return [
        replace(
            one, content=one.content[::SHORTER], num_output_tokens=max(1, one.num_output_tokens // SHORTER)
        )
        for one in trace_requests(moved, BlockVocabulary(), "", speed=speed, longest=SHORTER * LONGEST)
    ]


async def run(config: EngineConfig, router: Router, load: Sequence[Request]) -> Found:
    """Send the load to two new engines behind a router."""

    def make(place: Place) -> RemoteEngine:
        return RemoteEngine(config, measure=True, processors=place.processors, num_sharing=2)

    places = divide(allowed_cores(), 2)
    replicas = Replicas(make, places, router, block_size=config.block_size, drain_s=1.0)
    await replicas.start()
    begin_s = time.monotonic()

    async def ask(index: int, one: Request) -> tuple[int, int, float]:
        await asyncio.sleep(begin_s + one.at_s - time.monotonic())
        prompt = tuple(FIRST_ID + token for token in one.content if isinstance(token, int))
        params = SamplingParams(max_tokens=one.num_output_tokens, temperature=0, seed=0, ignore_eos=True)
        sent_s = time.monotonic()
        stream = replicas.submit(NewRequest(str(index), prompt, params, arrival_s=sent_s))
        outputs = await stream.get()
        first_s, num_cached = time.monotonic() - sent_s, outputs[0].num_cached_tokens
        while outputs[-1].finish_reason is None:
            outputs = await stream.get()
        return len(prompt), num_cached, first_s

    answered = await asyncio.gather(*(ask(index, one) for index, one in enumerate(load)))
    wall_s = time.monotonic() - begin_s
    await replicas.close()
    cached = sum(one[1] for one in answered) / sum(one[0] for one in answered)
    return Found(cached, sorted(one[2] for one in answered), wall_s)


def compare(config: EngineConfig, name: str, options: argparse.Namespace) -> None:
    """Print a table for a trace."""
    trace = list(islice(read_trace(TRACES / FILES[name]), options.requests))
    makers: dict[str, Callable[[], Router]] = {
        "round robin": RoundRobin,
        "two choices": TwoChoices,
        "prefix": lambda: PrefixRouter(config),
        "oracle": LiveOracle,
    }
    at_once = asyncio.run(run(config, RoundRobin(), requests(trace, 1e6)))
    saturated = len(trace) / at_once.wall_s
    print(f"{name}: replicas in turns are saturated by {saturated:.2f} requests/s", flush=True)
    for load in options.loads:
        rounds: dict[str, list[Found]] = {one: [] for one in makers}
        for number in range(options.rounds):
            for router in list(makers)[:: 1 if number % 2 == 0 else -1]:
                found = asyncio.run(run(config, makers[router](), requests(trace, load * saturated)))
                rounds[router].append(found)
        rows = [["trace", "load", "router", "cached", "of oracle", "TTFT p50", "p90", "p90 vs best", "range"]]
        most = statistics.median(one.cached_share for one in rounds["oracle"])
        best = [
            min(one.quantile(0.9), other.quantile(0.9))
            for one, other in zip(rounds["round robin"], rounds["two choices"], strict=True)
        ]
        for router, several in rounds.items():
            cached = statistics.median(one.cached_share for one in several)
            ttft = [statistics.median(1e3 * one.quantile(share) for one in several) for share in (0.5, 0.9)]
            gaps = [one.quantile(0.9) / other - 1 for one, other in zip(several, best, strict=True)]
            row = [name, f"{load:g}", router, f"{cached:.1%}", f"{cached / most:.1%}" if most else "-"]
            row += [f"{one:,.0f} ms" for one in ttft]
            rows.append([*row, f"{statistics.median(gaps):+.1%}", f"{min(gaps):+.1%} to {max(gaps):+.1%}"])
        print(columns(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trace", choices=[*FILES], nargs="+", default=[*FILES])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6])
    parser.add_argument("--requests", type=int, default=300, help="so many of a trace; default: 300")
    parser.add_argument("--rounds", type=int, default=3, help="of all routers; default: 3")
    options = parser.parse_args()
    config = EngineConfig(
        model=str(options.checkpoint), quantization="int4", num_threads=1, speculative="off"
    )
    for name in options.trace:
        compare(config, name, options)


if __name__ == "__main__":
    main()
