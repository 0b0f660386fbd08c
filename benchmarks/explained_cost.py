"""The cost of verdicts, receipts and recordings together: tokens a second of two installations, in turns.

    python benchmarks/explained_cost.py --other ../before/.venv/bin/python --rounds 16

Two servers of 135M random weights in int4 run at once: this installation with --record, and another one, such
as that of a commit before verdicts. Sixteen streams are sent to one, then to the other, in turns that begin
with either; the ratio is taken within a round, since the machine may be faster in the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from peers import checkpoints
from serving.processes import ServerProcess

LOAD = ("--max-concurrency", "16", "--random-input-len", "64", "--random-output-len", "192", "--ignore-eos")


def throughput(server: ServerProcess, num_prompts: int, folder: Path) -> float:
    """Return the tokens that a server gives in a second."""
    path = folder / "figures.json"
    flags = ("--base-url", server.url, "--num-prompts", str(num_prompts), *LOAD, "--json", str(path))
    subprocess.run([sys.executable, "-m", "quire", "bench", *flags], check=True, capture_output=True)
    return float(json.loads(path.read_text())["output_throughput"])


async def compare(options: argparse.Namespace, folder: Path) -> None:
    """Print the tokens a second of both in each round, and the ratios over all."""
    flags = (str(checkpoints.make("s135", options.work)), "--quantization", "int4")
    this = ServerProcess([*flags, "--record", str(folder / "recording")], folder / "this.log")
    other = ServerProcess(flags, folder / "other.log")
    other.command[0] = options.other
    ratios: list[float] = []
    async with AsyncExitStack() as stack:
        for server in (this, other):
            await stack.enter_async_context(server)
            throughput(server, options.num_prompts, folder)
        for number in range(options.rounds):
            order = (this, other) if number % 2 else (other, this)
            found = {server: throughput(server, options.num_prompts, folder) for server in order}
            ratios.append(found[this] / found[other])
            print(f"{found[this]:8,.0f} {found[other]:8,.0f} tokens/s   {ratios[-1]:.3f}", flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"median {middle:.3f}, quartiles {low:.3f} and {high:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--other", required=True, metavar="PYTHON", help="of the other installation")
    parser.add_argument("--rounds", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N", help="of a turn; default: 24")
    checkpoints.add_work_option(parser)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
