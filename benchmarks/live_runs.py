"""Live runs of a server on this machine beside simulations of the same requests, for `simulation.py --live`.

The server runs at several parts of its saturation in turns, each several times with the same lengths and
arrivals. A law is fitted to what clients saw of the first half of the requests, and tested on the other half.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from peers import checkpoints
from serving import processes
from serving.processes import ServerProcess

from quire.bench.driver import Done, LoadRun, Progress, drive
from quire.bench.http_client import Client
from quire.bench.metrics import Timeline
from quire.bench.openai_api import COMPLETIONS, Api, begin, find_model
from quire.bench.report import columns
from quire.bench.workload import Lengths, PromptVocabulary, Request, poisson, random_requests
from quire.build import make_scheduler
from quire.config import EngineConfig
from quire.description import describe
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.roofline.probe import ceilings
from quire.simulation.fit import SEEN_BY_CLIENTS, Latency, fit
from quire.simulation.shares import RoofShares, at_shares
from quire.simulation.simulate import simulate

LENGTHS = Lengths(128, 64, 0.5)
TOKEN_IDS = range(300, 40_000)  # words of the tokenizer of s135
PREFILL_TOKENS = 48  # the default of `quire serve`
SATURATED_S = 12.0  # for which as much is asked as can be answered


@dataclass
class Part:
    """Runs at one part of saturation: their requests, and the timelines of each repetition."""

    share: float
    requests: list[Request]
    runs: list[list[Timeline]] = field(default_factory=list)

    def latencies(self, part: slice) -> list[list[Latency]]:
        """Return the latencies of some of the requests, in the order of sending, for each repetition."""
        return [[Latency.of(one) for one in run[part]] for run in self.runs]


class LiveRuns:
    """All runs of one server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model = checkpoints.make("s135", options.work)
        self.config = EngineConfig(
            model=str(model),
            quantization="int4",
            max_num_seqs=options.max_num_seqs,
            max_num_prefill_tokens=PREFILL_TOKENS,
            enable_prefix_caching=False,  # repetitions have the same prompts
            speculative="off",  # the simulation drafts nothing
        )
        self.description = describe(self.config)

    def scheduler(self) -> Scheduler:
        return make_scheduler(self.config, self.description.memory)

    async def measure(self) -> list[Part]:
        """Start the server and make all runs."""
        flags = [self.config.model, "--quantization", "int4", "--no-enable-prefix-caching"]
        flags += ["--speculative", "off"]
        flags += ["--max-num-seqs", str(self.config.max_num_seqs)]
        async with ServerProcess(flags, self.options.work / "live.log") as server:
            client = Client(server.url, timeout_s=300.0)
            name = (await find_model(client, None)).name
            api = Api(COMPLETIONS, name, extra={"ignore_eos": True, "temperature": 0})
            rate = await self._saturation(client, api)
            print(f"saturation: {rate:.2f} requests/s", file=sys.stderr)
            parts = [Part(share, self._requests(share * rate, index)) for index, share in enumerate(SHARES)]
            for number in range(self.options.repeats):
                for part in parts[:: 1 if number % 2 else -1]:
                    run = await _send(client, api, part.requests, is_open=True)
                    part.runs.append(sorted(run.timelines, key=lambda one: one.planned_s or 0.0))
                    seen = [_mean(half) for half in (part.latencies(slice(None))[-1],)]
                    print(f"{number} {part.share} {seen}", file=sys.stderr)
            client.close()
        return parts

    async def _saturation(self, client: Client, api: Api) -> float:
        """Return the requests per second that the full server completes."""
        endless = random_requests(LENGTHS, PromptVocabulary(TOKEN_IDS), 99)
        how = {"max_concurrency": self.config.max_num_seqs, "until_s": SATURATED_S}
        run = await _send(client, api, endless, is_open=False, **how)
        ends = sorted(one.end_s for one in run.timelines)
        first, last = len(ends) // 4, 3 * len(ends) // 4
        return (last - first) / (ends[last] - ends[first])

    def _requests(self, rate: float, seed: int) -> list[Request]:
        drawn = random_requests(LENGTHS, PromptVocabulary(TOKEN_IDS), seed)
        count = max(2 * round(rate * self.options.seconds / 2), 20)
        return list(islice(poisson(drawn, rate, seed), count))


async def _send(client: Client, api: Api, requests: Iterable[Request], **how: object) -> LoadRun:
    def send(request: Request, planned_s: float | None, done: Done) -> None:
        begin(client, api, request, done, planned_s, lambda: None)

    run = await drive(requests, send, Progress(None, None), **how)
    if errors := {one.error for one in run.timelines if one.error}:
        raise SystemExit(f"requests failed: {errors}")
    return run


SHARES = (0.3, 0.6, 0.9)


def _mean(latencies: Sequence[Latency]) -> Latency:
    return Latency(*(sum(values) / len(values) for values in zip(*latencies, strict=True)))


class Comparison:
    """A law fitted to the first half of all runs, and its errors on the other half."""

    def __init__(self, live: LiveRuns, parts: Sequence[Part]) -> None:
        self.live, self.parts = live, parts
        found = ceilings(live.description.device.loops())
        self.roof: StepLaw = law_at_the_roof(fold_costs(live.description), found)

    def fit(self) -> RoofShares:
        measured = []
        for part in self.parts:
            runs = part.latencies(slice(len(part.requests) // 2))
            measured.append([_mean(one) for one in zip(*runs, strict=True)])
        return fit(measured, self._first_halves, SEEN_BY_CLIENTS)

    def _first_halves(self, shares: RoofShares) -> list[list[Latency]]:
        return [self._predict(part, shares, len(part.requests) // 2) for part in self.parts]

    def _predict(self, part: Part, shares: RoofShares, count: int | None = None) -> list[Latency]:
        done = simulate(
            self.live.scheduler(),
            at_shares(self.roof, shares),
            part.requests,
            delays=shares.delays,
            num_first=count,
        )
        return [Latency.of(one) for one in done.timelines[:count]]

    def rows(self, shares: RoofShares) -> list[list[str]]:
        """Return a table of the errors on both halves, with the spread of repetitions."""
        rows = [["of saturation", "half", "", "live", "spread", "simulated", "error"]]
        for part in self.parts:
            predicted, count = self._predict(part, shares), len(part.requests) // 2
            for title, half in (("fitted", slice(count)), ("tested", slice(count, None))):
                repeats = [_mean(run) for run in part.latencies(half)]
                live, found = _mean(repeats), _mean(predicted[half])
                for kind, name in enumerate(("TTFT", "TPOT")):
                    values = [one[kind] for one in repeats]
                    spread = (max(values) - min(values)) / live[kind]
                    shown = [f"{1e3 * one[kind]:.1f} ms" for one in (live, found)]
                    error = f"{found[kind] / live[kind] - 1:+.1%}"
                    rows.append([f"{part.share}", title, name, shown[0], f"{spread:.0%}", shown[1], error])
        return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="of each live run (default: 4)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="of a live run (default: 20)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, metavar="N", help="of the server (default: 16)"
    )
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the latencies of live runs here")


def main(options: argparse.Namespace) -> None:
    live = LiveRuns(options)
    parts: list[Part] = []

    async def measure() -> None:
        parts.extend(await live.measure())

    processes.run(measure())
    if options.json:
        kept = [{"share": p.share, "latencies": p.latencies(slice(None))} for p in parts]
        options.json.write_text(json.dumps(kept))
    comparison = Comparison(live, parts)
    shares = comparison.fit()
    print(shares, file=sys.stderr)
    print(columns(comparison.rows(shares)))
