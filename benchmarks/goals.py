"""Goals instead of budgets: what `--itl-goal` and `--ttft-goal` keep, and what they cost, on live servers.

    python benchmarks/goals.py                                 both parts on 135M random weights, int4
    python benchmarks/goals.py --parts itl --itl-goal 80ms     one of them
    python benchmarks/goals.py --chunks 32 64 96 128           other fixed settings
    python benchmarks/goals.py --law 3,0.4,0.1                 a device that sleeps so many milliseconds a
                                                               step, a token and a row instead of computing

    itl    16 streams beside which prompts of 2,048 arrive, one request in five: the gap between tokens and
           the tokens a second of a server with the goal, and of servers with fixed --max-num-prefill-tokens
    ttft   requests at twice the rate that a server can answer: the time to first token of those it accepts,
           with the goal and without it

All servers of a part run at once and take turns in every round, so that the machine is the same for all;
those whose turn it is not compute nothing. The model is made once in --work (270 MB).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving import measuring
from serving.processes import ServerProcess

from quire.bench.driver import LoadRun
from quire.bench.http_client import Client
from quire.bench.metrics import Spread, Timeline, summarize
from quire.bench.openai_api import COMPLETIONS, Api, Unusable, find_model
from quire.bench.report import columns
from quire.bench.workload import Lengths, PromptVocabulary, Request, first, poisson, random_requests
from quire.goals import Goal, duration_ms

STREAMS, LONG_PROMPT, LONG_OUTPUT, STREAM_PROMPT = 16, 2048, 8, 64
STREAM_OUTPUT = (100, 300)  # from ... to
ONE_LONG_IN = 5
TOKEN_IDS = range(300, 2000)
NAME = "with the goal"
SLEEPING = (
    "import sys; sys.path.insert(0, {folder!r}); import sleeping_engine; sleeping_engine.use({law!r}); "
    "from quire.cli.main import main; main()"
)
SHORT = Lengths(256, 48, range_ratio=0.5)  # of the part about the time to first token
CALIBRATED_S = 8.0


@dataclass(slots=True)
class Target:
    """A server under load, and what it has answered."""

    name: str
    client: Client
    api: Api
    timelines: list[Timeline] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)  # of prompts and answers, by round

    async def run(self, requests: Iterable[Request], **how: Any) -> LoadRun:
        return await measuring.send(self.client, self.api, requests, **how)

    def gaps(self) -> Spread:
        spread = Spread.of(1e3 * (end - begin) for one in self.timelines for begin, end in one.gaps())
        if spread is None:
            raise Unusable(f"{self.name}: no gaps between tokens")
        return spread


class Goals:
    """Both parts. Each gives its figures, and says them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}

    async def run(self) -> None:
        for part in self.options.parts:
            self.figures[part] = await getattr(self, part)()

    async def _start(self, stack: AsyncExitStack, name: str, *flags: str, num_seqs: int) -> Target:
        log = self.options.work / f"goals-{name.replace(' ', '-')}.log"
        kind = () if self.options.kind == "bf16" else ("--quantization", self.options.kind)
        own = ("--no-enable-prefix-caching", "--max-num-seqs", str(num_seqs), "--kv-cache-memory-bytes", "2G")
        arguments = (str(self.options.model), *kind, *own, *flags)
        server = ServerProcess(arguments, log)
        if self.options.law is not None:
            server.command[1:3] = [
                "-c",
                SLEEPING.format(folder=str(Path(__file__).parent), law=self.options.law),
            ]
        await stack.enter_async_context(server)
        client = Client(server.url, timeout_s=300.0)
        stack.callback(client.close)
        model = (await find_model(client, None)).name
        return Target(name, client, Api(COMPLETIONS, model, extra={"ignore_eos": True, "temperature": 0}))

    async def itl(self) -> dict[str, Any]:
        """Round 0 warms all up, and shows the server with the goal what steps take."""
        goal_ms = duration_ms(self.options.itl_goal)
        async with AsyncExitStack() as stack:
            targets = [
                await self._start(stack, NAME, "--itl-goal", self.options.itl_goal, num_seqs=STREAMS + 1)
            ]
            for chunk in self.options.chunks:
                flags = ("--max-num-prefill-tokens", str(chunk))
                targets.append(await self._start(stack, f"chunks of {chunk}", *flags, num_seqs=STREAMS + 1))
            for number in range(self.options.rounds + 1):
                requests = mixture(number, self.options.requests)
                for target in targets[:: 1 if number % 2 else -1]:
                    run = await target.run(requests, max_concurrency=STREAMS + 1)
                    if number:
                        self._take(target, run)
        return self._compare(targets, goal_ms)

    def _take(self, target: Target, run: LoadRun) -> None:
        summary = summarize(run.timelines, run.duration_s, Goal())
        if summary.failed or summary.itl is None:
            raise Unusable(f"{target.name}: {summary.errors}")
        per_s = summary.per_s(summary.num_prompt_tokens + summary.num_output_tokens)
        target.timelines += run.timelines
        target.tokens_per_s.append(per_s)
        gaps = f"p50 {summary.itl.p50:.1f} ms, p99 {summary.itl.p99:.1f} ms"
        print(f"{target.name}: {gaps}, {per_s:,.0f} tokens/s", flush=True)

    def _compare(self, targets: Sequence[Target], goal_ms: float) -> dict[str, Any]:
        with_goal = targets[0]
        rows = []
        for target in targets:
            gaps = target.gaps()
            pairs = zip(with_goal.tokens_per_s, target.tokens_per_s, strict=True)
            rows.append(
                {
                    "setting": target.name,
                    "p50_ms": gaps.p50,
                    "p99_ms": gaps.p99,
                    "tokens_per_s": statistics.median(target.tokens_per_s),
                    "goal_over_it": statistics.median(own / other for own, other in pairs),
                }
            )
        keeping = [row for row in rows[1:] if row["p99_ms"] <= goal_ms]
        best = max(keeping, key=lambda row: row["tokens_per_s"], default=None)
        show(rows)
        kept = rows[0]["p99_ms"] <= goal_ms
        print(f"goal {goal_ms:g} ms: {'kept' if kept else 'broken'}, p99 {rows[0]['p99_ms']:.1f} ms")
        if best is not None:
            print(f"throughput over the best that keeps it ({best['setting']}): {best['goal_over_it']:.3f}")
        return {"rows": rows, "kept": kept, "best": best}

    async def ttft(self) -> dict[str, Any]:
        goal_s = duration_ms(self.options.ttft_goal) / 1e3
        endless = random_requests(SHORT, PromptVocabulary(TOKEN_IDS), 7)
        async with AsyncExitStack() as stack:
            flags = ("--ttft-goal", self.options.ttft_goal)
            targets = [await self._start(stack, NAME, *flags, num_seqs=STREAMS)]
            targets.append(await self._start(stack, "without it", num_seqs=STREAMS))
            full = await targets[1].run(endless, max_concurrency=STREAMS, until_s=CALIBRATED_S)
            capacity = sum(not one.error for one in full.timelines) / full.duration_s
            await targets[0].run(endless, max_concurrency=STREAMS, until_s=CALIBRATED_S)  # learns
            print(f"capacity {capacity:.1f} requests/s")
            for number in range(self.options.rounds):
                arriving = first(poisson(endless, 2 * capacity, number), 1 << 20, self.options.seconds)
                for target in targets[:: 1 if number % 2 else -1]:
                    run = await target.run(arriving, is_open=True)
                    target.timelines += run.timelines
                    target.tokens_per_s.append(_good(run.timelines, goal_s) / run.duration_s)
        rows = [_first_tokens(target, goal_s) for target in targets]
        show(rows)
        return {"capacity": capacity, "rows": rows}


def mixture(seed: int, count: int) -> list[Request]:
    """Streams, and prompts of LONG_PROMPT tokens with short answers as one in ONE_LONG_IN."""
    words, dice = PromptVocabulary(TOKEN_IDS), random.Random(seed)
    long = iter(random_requests(Lengths(LONG_PROMPT, LONG_OUTPUT), words, 2 * seed))
    short = iter(random_requests(Lengths(STREAM_PROMPT, 1), words, 2 * seed + 1))
    return [
        next(long)
        if index % ONE_LONG_IN == ONE_LONG_IN - 1
        else replace(next(short), num_output_tokens=dice.randint(*STREAM_OUTPUT))
        for index in range(count)
    ]


def _good(timelines: Iterable[Timeline], goal_s: float) -> int:
    return sum(one.ttft_s is not None and one.ttft_s <= goal_s for one in timelines)


def _first_tokens(target: Target, goal_s: float) -> dict[str, Any]:
    answered = [one for one in target.timelines if one.ttft_s is not None]
    spread = Spread.of(one.ttft_s or 0.0 for one in answered)
    if spread is None:
        raise Unusable(f"{target.name}: nothing was answered")
    return {
        "setting": target.name,
        "accepted": len(answered) / len(target.timelines),
        "ttft_p50_s": spread.p50,
        "ttft_p90_s": spread.p90,
        "ttft_p99_s": spread.p99,
        "in_time": _good(answered, goal_s) / len(answered),
        "good_per_s": statistics.mean(target.tokens_per_s),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    cells = [
        [
            value if isinstance(value, str) else f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
            for value in row.values()
        ]
        for row in rows
    ]
    print(f"\n{columns([list(rows[0]), *cells])}\n", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parts = ("itl", "ttft")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: both")
    measuring.add_options(parser, "int4")
    parser.add_argument("--law", metavar="MS", help="of a device that sleeps: a step, a token, a row")
    parser.add_argument("--itl-goal", default="60ms", metavar="TIME", help="default: 60ms")
    parser.add_argument("--ttft-goal", default="1s", metavar="TIME", help="default: 1s")
    words = "fixed settings to compare with (default: 32 48 64 96 128 192)"
    chunks = [32, 48, 64, 96, 128, 192]
    parser.add_argument("--chunks", type=int, nargs="+", default=chunks, metavar="N", help=words)
    parser.add_argument("--requests", type=int, default=50, metavar="N", help="of a turn (default: 50)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of a turn; default: 15")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    measuring.prepare(options)
    measuring.measure(Goals(options), options.json)


if __name__ == "__main__":
    main()
