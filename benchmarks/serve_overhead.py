"""The cost of serving and of overload: three measurements of a Quire server on this machine.

    python benchmarks/serve_overhead.py                              all three on 135M random weights, int8
    python benchmarks/serve_overhead.py --parts ratio --rounds 7     one of them
    python benchmarks/serve_overhead.py --model demo --kind bf16     another model

    ratio      the same requests, 32 at once, through HTTP and by LLM.generate in a process of its own, in
               turns: output tokens a second, and their ratio
    gap        32 streams while a long prompt arrives: the gap between tokens, p99 over p50
    overload   requests at 1, 2 and 10 times the rate that the server can answer, in turns of one run: goodput
               against its peak, how long a refusal takes, what the processes hold before and after

Server, engine and this client share the machine, as they do for its user; the client says what it took.
The model is made once in --work (270 MB).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serving import measuring
from serving.offline import Offline
from serving.processes import ServerProcess
from serving.turns import arrivals, cores, in_turns, row

from quire.bench.driver import LoadRun
from quire.bench.http_client import Client
from quire.bench.metrics import summarize
from quire.bench.openai_api import COMPLETIONS, Api, Unusable, find_model
from quire.bench.report import columns
from quire.bench.workload import Lengths, PromptVocabulary, Request, first, random_requests
from quire.goals import Goal

STREAMS = 32
RATIO_REQUESTS, RATIO_PROMPT, RATIO_OUTPUT = 64, 64, 128
GAP_OUTPUT, GAP_AT_S = 400, 3.0
OVERLOAD_PROMPT, OVERLOAD_RANGE = 64, 0.5  # of one length they would end all at once, as they began
CALIBRATED_S = 8.0  # how long it is asked for as much as it can answer, to find out how much that is
QUEUE = 32  # requests that may wait in the part about overload: as many as run
# The long prompt needs a slot in addition to the streams: what is measured is how it is computed among them.
PART_OPTIONS = {"gap": {"max_num_seqs": STREAMS + 1}, "overload": {"max_queued_requests": QUEUE}}
TOKEN_IDS = range(300, 2000)  # words of every model that is measured here
MB = 1 << 20


class Target:
    """A server under load."""

    def __init__(self, server: ServerProcess, client: Client, api: Api) -> None:
        self.server, self.client, self.api = server, client, api

    async def run(self, requests: Iterable[Request], **how: Any) -> LoadRun:
        return await measuring.send(self.client, self.api, requests, **how)


class Overhead:
    """The three parts. Each gives its figures, and says them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
        self.engine = {
            "model": str(options.model),
            "quantization": None if options.kind == "bf16" else options.kind,
            "max_num_seqs": STREAMS,
            "enable_prefix_caching": False,
            "speculative": "off",
        }
        for name in ("max_num_batched_tokens", "num_threads"):
            if value := getattr(options, name):
                self.engine[name] = value

    def arguments(self, **more: Any) -> list[str]:
        """Of `quire serve`, for the same engine that LLM is given."""
        flags = [str(self.engine["model"])]
        for name, value in (self.engine | more).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None and name != "model":
                flags += [f"--{flag}", str(value)]
        return flags

    async def run(self) -> None:
        for part in self.options.parts:
            more = PART_OPTIONS.get(part, {})
            log = self.options.work / f"server-{part}.log"
            async with ServerProcess(self.arguments(**more), log) as server:
                client = Client(server.url, timeout_s=120.0)
                model = (await find_model(client, None)).name
                target = Target(
                    server, client, Api(COMPLETIONS, model, extra={"ignore_eos": True, "temperature": 0})
                )
                self.figures[part] = await getattr(self, part)(target)
                client.close()

    def requests(self, seed: int, count: int, prompt: int, output: int) -> list[Request]:
        shape = Lengths(prompt, output)
        return first(random_requests(shape, PromptVocabulary(TOKEN_IDS), seed), count)

    async def ratio(self, target: Target) -> dict[str, Any]:
        """Round 0 warms both up."""
        rows: list[dict[str, float]] = []
        async with Offline(**self.engine) as offline:
            for index in range(self.options.rounds + 1):
                requests = self.requests(index, RATIO_REQUESTS, RATIO_PROMPT, RATIO_OUTPUT)
                row: dict[str, float] = {}
                for way in ("generate", "http")[:: 1 if index % 2 else -1]:
                    row |= await self._one_way(way, requests, target, offline)
                if index:
                    rows.append(row)
                    print("  ".join(f"{name} {value:,.2f}" for name, value in row.items()), flush=True)
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        medians["ratio"] = statistics.median(
            row["http_tokens_per_s"] / row["generate_tokens_per_s"] for row in rows
        )
        print(f"\nHTTP / LLM.generate, median of {len(rows)} rounds: {medians['ratio']:.3f}\n")
        return {"rounds": rows, **medians}

    async def _one_way(
        self, way: str, requests: list[Request], target: Target, offline: Offline
    ) -> dict[str, float]:
        if way == "generate":
            prompts = [request.content for request in requests]
            answer = await offline.generate(prompts, RATIO_OUTPUT)  # type: ignore[arg-type]
            return {"generate_tokens_per_s": answer["tokens"] / answer["seconds"]}
        before = target.server.usage()
        run = await target.run(requests, max_concurrency=STREAMS)
        after = target.server.usage()
        summary = summarize(run.timelines, run.duration_s, Goal())
        if summary.failed:
            raise Unusable(f"requests failed: {summary.errors}")
        tokens = summary.num_output_tokens
        cpu_us = {
            f"{name}_us_per_token": 1e6 * (after[name].cpu_s - before[name].cpu_s) / tokens for name in after
        }
        own = {"client_us_per_token": 1e6 * run.cpu_s / tokens}
        return {"http_tokens_per_s": summary.per_s(tokens), **cpu_us, **own}

    async def gap(self, target: Target) -> dict[str, Any]:
        requests = self.requests(99, STREAMS, RATIO_PROMPT, GAP_OUTPUT)
        long = Request(self.requests(98, 1, self.options.long_prompt, 1)[0].content, 8, GAP_AT_S)
        await target.run(requests[:8], max_concurrency=STREAMS)  # warms up
        found = []
        for _ in range(self.options.rounds):
            run = await target.run(requests, max_concurrency=STREAMS, injected=[long])
            spread = summarize(run.timelines, run.duration_s, Goal()).itl
            injected = next(iter(run.injected), None)
            if spread is None or injected is None or injected.error:
                raise Unusable(f"the long prompt: {injected.error if injected else 'the run was too short'}")
            found.append(
                {
                    "p50_ms": spread.p50,
                    "p99_ms": spread.p99,
                    "max_ms": spread.largest,
                    "p99_over_p50": spread.p99 / spread.p50,
                    "long_ttft_ms": 1e3 * (injected.ttft_s or 0.0),
                }
            )
            print("  ".join(f"{name} {value:,.2f}" for name, value in found[-1].items()), flush=True)
        ratio = statistics.median(row["p99_over_p50"] for row in found)
        print(f"\ngap between tokens, p99 / p50, median of {len(found)}: {ratio:.2f}\n")
        return {"rounds": found, "p99_over_p50": ratio}

    async def overload(self, target: Target) -> dict[str, Any]:
        """The goal comes from the server when it is just full: twice its time per token, thrice its queue."""
        seconds = self.options.seconds
        shape = Lengths(OVERLOAD_PROMPT, self.options.output_tokens, range_ratio=OVERLOAD_RANGE)
        endless = random_requests(shape, PromptVocabulary(TOKEN_IDS), 7)
        full = await target.run(endless, max_concurrency=STREAMS, until_s=CALIBRATED_S)
        summary = summarize(full.timelines, full.duration_s, Goal())
        if not summary.tpot or not summary.completed:
            raise Unusable(f"nothing was answered: {summary.errors}")
        capacity = summary.per_s(summary.completed)
        goal = Goal.parse_pairs((f"ttft:{3e3 * QUEUE / capacity:.0f}", f"tpot:{2 * summary.tpot.p50:.0f}"))
        print(f"capacity {capacity:.1f} requests/s; goal: {goal}", flush=True)
        rates = (1.0, 2.0, self.options.times)
        turns = in_turns(rates, self.options.rounds, seconds)
        before, busy = _held(target.server), asyncio.create_task(cores(target.server, turns))
        run = await target.run(arrivals(endless, turns, capacity), is_open=True)
        rows = [row(turn, run, goal) | own for turn, own in zip(turns, await busy, strict=True)]
        held = [before, _held(target.server)]
        for own in rows:
            print("  ".join(f"{name} {value}" for name, value in own.items()), flush=True)
        found: dict[str, Any] = {"capacity": capacity, "goal": str(goal), "rows": rows, "mb": held}
        for name in ("goodput", "tokens_per_s"):
            means = [statistics.mean(own[name] for own in rows if own["times"] == one) for one in rates]
            found[f"{name}_over_peak"] = means[-1] / max(means)
            shown = ", ".join(f"{mean:.2f}" for mean in means)
            print(f"\n{name} at {', '.join(f'{one:g}' for one in rates)} times capacity: {shown}")
            print(f"at {rates[-1]:g} times over the peak: {found[f'{name}_over_peak']:.3f}")
        print(f"MB held: {held[0]} to {held[-1]}\n")
        return found


def _held(server: ServerProcess) -> dict[str, float]:
    return {name: round(one.rss_bytes / MB, 1) for name, one in server.usage().items()}


def markdown(figures: dict[str, Any]) -> str:
    """The three answers as tables."""
    parts = []
    for part in ("ratio", "gap", "overload"):
        rows = figures.get(part, {}).get("rounds") or figures.get(part, {}).get("rows")
        if rows:
            cells = [
                [f"{row[name]:,.2f}" if row[name] is not None else "" for name in rows[0]] for row in rows
            ]
            parts.append(f"### {part}\n\n{columns([list(rows[0]), *cells])}\n")
    return "\n".join(parts)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parts = ("ratio", "gap", "overload")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    measuring.add_options(parser, "int8")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--long-prompt", type=int, default=2048, metavar="TOKENS", help="default: 2048")
    parser.add_argument("--times", type=float, default=10.0, metavar="X", help="overload; default: 10")
    words = "of answers under overload, about (default: 32)"
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N", help=words)
    words = "of a turn of overload, a third of which is left out (default: 9)"
    parser.add_argument("--seconds", type=float, default=9.0, metavar="S", help=words)
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="default: the engine's")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: the engine's")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    measuring.prepare(options)
    overhead = Overhead(options)
    try:
        measuring.measure(overhead, options.json)
    finally:
        if options.markdown:
            options.markdown.write_text(markdown(overhead.figures), "utf-8")


if __name__ == "__main__":
    main()
