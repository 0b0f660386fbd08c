"""Agreement of searches for a goal: `quire bench --goal` several times, on a device that sleeps.

    python benchmarks/goal_search.py                         two with the same arrivals, two with others
    python benchmarks/goal_search.py --model MODEL --runs 6   a real engine instead

Server and client are real; with the sleeping device only the time of steps is known beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from serving import processes
from serving.processes import ServerProcess
from sleeping_engine import LAW_MS

SERVE = "import sleeping_engine, sys; sleeping_engine.use({law!r}); from quire.cli.main import main; main()"
GOAL = "ttft_p90<500ms,itl_p99<60ms"


async def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [options.model or "demo", "--max-num-seqs", str(options.max_num_seqs)]
        server = ServerProcess(flags, folder / "log")
        if not options.model:
            path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
            server.command[1:3] = ["-c", path + SERVE.format(law=options.law)]
            server.command += ["--device", "null"]
        async with server:
            rates = [await search(options, server.url, folder, run) for run in range(options.runs)]
    pairs = [*zip(rates[::2], rates[1::2], strict=False)]
    worst = max(max(pair) / min(pair) - 1 for pair in pairs)
    print(f"\nsame arrivals: pairs differ by at most {worst:.1%}")
    print(f"all runs: {min(rates):.2f} to {max(rates):.2f} requests/s, {max(rates) / min(rates) - 1:.1%}")


async def search(options: argparse.Namespace, url: str, folder: Path, run: int) -> float:
    """Return the rate that one command finds; each pair of runs has a seed of its own."""
    path = folder / "figures.json"
    command = [sys.executable, "-m", "quire", "bench", "--base-url", url, "--goal", options.goal]
    command += ["--random-input-len", "256", "--random-output-len", "64", "--json", str(path)]
    command += ["--seed", str(1000 * (run // 2)), "--repeats", str(options.repeats)]
    if options.num_prompts:
        command += ["--num-prompts", str(options.num_prompts)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    if await process.wait():
        raise SystemExit("quire bench failed")
    found = json.loads(path.read_text("utf-8"))
    rate = float(found["highest_request_rate"])
    print(f"run {run + 1}: {rate:.3f} requests/s, {len(found['trials'])} trials", flush=True)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the demo model on a device that sleeps")
    add(
        "--law",
        default=LAW_MS,
        metavar="MS",
        help="a step, a token, a row that samples (default: %(default)s)",
    )
    add("--goal", default=GOAL, help="default: %(default)s")
    add("--max-num-seqs", type=int, default=16, metavar="N", help="of the server (default: 16)")
    add("--num-prompts", type=int, metavar="N", help="of a trial (default: the command's)")
    add("--repeats", type=int, default=1, metavar="N", help="of a search (default: 1)")
    add("--runs", type=int, default=4, metavar="N", help="of the command (default: 4)")
    processes.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
