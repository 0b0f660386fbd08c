"""Repeat faults, and check that a Quire server keeps its promises; the report is Markdown.

    make endurance ARGS="faults"                           all three parts: half an hour
    make endurance ARGS="faults --parts drains --drains 10"
    make endurance ARGS="faults --report faults.md"

Starts `quire serve demo` as often as needed. The promises; the status is 1 if one is broken:

    kills    The engine's process is killed (SIGKILL) at random moments, while 12 streams and 4 other
             requests run or wait, and 3 more come while there is no engine. Each is answered in full or gets
             an error for the engine's death: open streams within a second, all others within 5 s of the
             next engine, which starts by itself. Then prompts give what they gave before, to the bit, and no
             block of the KV cache is held. At the tenth death the server gives up and ends with status 1, as
             it should: a supervisor would start another, and so does this.
    drains   Servers are sent SIGTERM while 12 clients ask without end. Every request that was sent before
             is answered in full; those sent after it get a 503 or no connection; the exit status is 0.
    aborts   Clients leave at random moments: while they wait, while their prompt is computed, in the middle
             of an answer. A second after the last of each thousand has gone, nothing is held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from serving import processes

from endurance.aborting import Aborter, Aborts
from endurance.clock import Clock
from endurance.draining import Drainer, Drains
from endurance.killing import Killer, Kills
from endurance.verdict import processor
from quire.bench.openai_api import Unusable
from quire.bench.report import columns

PARTS: dict[str, type[Killer | Drainer | Aborter]] = {"kills": Killer, "drains": Drainer, "aborts": Aborter}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--kills", type=int, default=100, metavar="N", help="default: 100")
    add("--drains", type=int, default=100, metavar="N", help="default: 100")
    add("--aborts", type=int, default=10_000, metavar="N", help="default: 10,000")
    add("--seed", type=int, default=0, help="of the traffic and the moments (default: 0)")
    add("--report", type=Path, metavar="FILE", help="write it here, too")
    return parser.parse_args()


def show(line: str) -> None:
    """Write the progress to a terminal."""
    if sys.stderr.isatty():
        print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, log: Path) -> dict[str, tuple[Kills | Drains | Aborts, float]]:
    """Run the parts; return findings and seconds of each. What a pause of the machine spoilt is repeated."""
    found, clock = {}, Clock()
    watch = asyncio.create_task(clock.watch())
    for name in options.parts:
        begin_s = clock.now_s()
        part = PARTS[name](getattr(options, name), options.seed, log, clock, show)
        found[name] = (await part.run(), clock.now_s() - begin_s)
    watch.cancel()
    show("")
    return found


def main() -> None:
    options = read_options()
    log, begin_s = Path(tempfile.mkstemp(prefix="quire-faults-", suffix=".log")[1]), time.time()
    try:
        found = processes.run(run(options, log))
    except Unusable as problem:
        sys.exit(f"{problem}\nlog: {log}")
    log.unlink()
    promises = [promise for part, _ in found.values() for promise in part.judged()]
    broken = [promise.name for promise in promises if not promise.is_kept]
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(begin_s))
    asked = ", ".join(f"{getattr(options, name):,} {name} in {s:.0f} s" for name, (_, s) in found.items())
    lines = [
        f"# Faults: {'broken: ' + ', '.join(broken) if broken else 'all promises kept'}",
        "",
        f"{when} UTC, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"seed {options.seed}: {asked}.",
        "",
        columns(
            [("promise", "", "found")]
            + [(p.name, "kept" if p.is_kept else "**broken**", p.found) for p in promises]
        ),
    ]
    problems = [problem for part, _ in found.values() for problem in part.problems]
    if problems:
        lines += ["", "## What was wrong", "", *(f"- {problem}" for problem in problems)]
    text = "\n".join(lines) + "\n"
    if options.report:
        options.report.write_text(text, "utf-8")
    print(text)
    sys.exit(1 if broken else 0)
