"""The cost of drafts to a server: speed, gaps and processor time with drafts and without, over HTTP.

    python benchmarks/speculation_serve.py                          135M random weights in int4, 16 streams
    python benchmarks/speculation_serve.py --model demo --streams 1 16

Two servers run at once, one of them with --speculative off. `quire bench` sends the same random prompts to
each in turns, in whose answers little repeats: what looking for drafts costs is seen where they do not help.
Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

from page_viewers import Figures, line, turn
from peers import checkpoints
from serving.processes import ServerProcess

LENGTHS = ("--random-input-len", "64", "--random-output-len", "128", "--ignore-eos")


async def compare(options: argparse.Namespace, folder: Path) -> None:
    """Print the figures of each round, and the ratios over all."""
    flags = [options.model] if options.model else [str(checkpoints.make("s135", options.work))]
    flags += [] if options.model == "demo" else ["--quantization", "int4"]
    ways = {"on": [*flags, "--speculative", options.speculative], "off": [*flags, "--speculative", "off"]}
    async with AsyncExitStack() as stack:
        servers = {name: ServerProcess(own, folder / f"{name}.log") for name, own in ways.items()}
        for server in servers.values():
            await stack.enter_async_context(server)
        for streams in options.streams:
            load = ("--max-concurrency", str(streams), *LENGTHS)
            rounds: list[dict[str, Figures]] = []
            for number in range(options.rounds + 1):
                order = [*servers][:: 1 if number % 2 else -1]
                found = {
                    name: turn(servers[name], streams * options.requests, folder, load) for name in order
                }
                if number:  # the first round warms up
                    rounds.append(found)
                    print("   ".join(f"{name} {line(found[name])}" for name in ("on", "off")), flush=True)
            report(streams, rounds)


def report(streams: int, rounds: list[dict[str, Figures]]) -> None:
    """Print the ratios within each round: median, least and largest."""
    for name in (one.name for one in fields(Figures)):
        ratios = [getattr(one["on"], name) / getattr(one["off"], name) for one in rounds]
        shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{streams} streams: {name:16} on / off: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="MODEL", help="default: 135M random weights")
    words = "drafts of the first server; default: auto"
    parser.add_argument("--speculative", default="auto", metavar="HOW", help=words)
    words = "at a time; default: 16"
    parser.add_argument("--streams", nargs="+", type=int, default=[16], metavar="N", help=words)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="default: 6")
    words = "requests of a turn for each stream; default: 2"
    parser.add_argument("--requests", type=int, default=2, metavar="N", help=words)
    checkpoints.add_work_option(parser)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
