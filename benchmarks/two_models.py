"""Two models in one server under load at once: each one's share of what it has alone, and its gaps.

    python benchmarks/two_models.py                      135M random weights as int4 and int8, 8 streams each
    python benchmarks/two_models.py --rounds 5 --streams 16

Rounds of three turns: the first model alone, the second alone, both at once. With a half of the processors,
a model has a share of 0.50 of its speed alone. Also how long the first request of each takes, which loads it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from serving import measuring
from serving.processes import ServerProcess

from quire.bench.http_client import Client
from quire.bench.metrics import summarize
from quire.bench.openai_api import COMPLETIONS, Api, Unusable
from quire.bench.report import columns
from quire.bench.workload import Lengths, PromptVocabulary, first, random_requests
from quire.goals import Goal

PROMPT, OUTPUT = 64, 64
TOKEN_IDS = range(300, 2000)
NAMES = ("int4", "int8")
CONFIG = """
enable-prefix-caching: false
speculative: "off"
max-model-len: 1024
max-num-seqs: {streams}
models:
  int4: {{model: {model}, quantization: int4}}
  int8: {{model: {model}, quantization: int8}}
"""


class Pair:
    """A server of two models, and the loads on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}

    async def run(self) -> None:
        """Measure all rounds and print the medians."""
        options = self.options
        config = options.work / "two-models.yaml"
        config.write_text(CONFIG.format(streams=options.streams, model=options.model), "utf-8")
        async with ServerProcess(["--config", str(config)], options.work / "two-models.log") as server:
            client = Client(server.url, timeout_s=120.0)
            loads = {name: await self.load(client, name) for name in NAMES}
            for name in NAMES:  # warm up
                await self.turn(client, (name,), 0)
            found = []
            for number in range(1, options.rounds + 1):
                turns = ((NAMES[0],), (NAMES[1],), NAMES)
                found.append({turn: await self.turn(client, turn, number) for turn in turns})
            client.close()
        self.figures |= {"rounds": [{"+".join(k): v for k, v in one.items()} for one in found]}
        self.report(found, loads)

    async def load(self, client: Client, name: str) -> float:
        """Return how long the first request for a model takes, in seconds."""
        begin_s = time.monotonic()
        await self.turn(client, (name,), 0, count=1)
        return time.monotonic() - begin_s

    async def turn(self, client: Client, names: tuple[str, ...], seed: int, count: int = 0) -> dict[str, Any]:
        """Send the same requests to each of these models at once; return the figures of each."""
        shape, most = Lengths(PROMPT, OUTPUT), self.options.streams
        loads = []
        for name in names:
            requests = first(random_requests(shape, PromptVocabulary(TOKEN_IDS), seed), count or 3 * most)
            api = Api(COMPLETIONS, name, extra={"ignore_eos": True, "temperature": 0})
            loads.append(measuring.send(client, api, requests, max_concurrency=most))
        runs = await asyncio.gather(*loads)
        return {name: _figures(run) for name, run in zip(names, runs, strict=True)}

    def report(self, found: list[dict[tuple[str, ...], dict[str, Any]]], loads: dict[str, float]) -> None:
        """Print the medians over rounds."""
        rows = []
        for name in NAMES:
            alone = [one[name,][name] for one in found]
            both = [one[NAMES][name] for one in found]
            shares = [b["speed"] / a["speed"] for a, b in zip(alone, both, strict=True)]
            pairs = [(key, own) for key in ("speed", "p99_ms") for own in (alone, both)]
            cells = [f"{statistics.median(one[key] for one in own):,.0f}" for key, own in pairs]
            rows.append([name, *cells, f"{statistics.median(shares):.2f}", f"{loads[name]:.2f} s"])
        speeds, gaps = ("alone tok/s", "both tok/s"), ("alone p99 ms", "both p99 ms")
        heading = ["model", *speeds, *gaps, "share", "first request"]
        print(columns([heading, *rows]))


def _figures(run: Any) -> dict[str, float]:
    summary = summarize(run.timelines, run.duration_s, Goal())
    if summary.errors or summary.itl is None:
        raise Unusable(f"requests failed: {summary.errors}")
    return {"speed": summary.num_output_tokens / summary.duration_s, "p99_ms": summary.itl.p99}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    measuring.add_options(parser, "int4")
    parser.add_argument("--streams", type=int, default=8, help="of each model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measuring.prepare(options)
    measuring.measure(Pair(options), options.json)


if __name__ == "__main__":
    main()
