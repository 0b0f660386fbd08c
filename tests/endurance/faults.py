"""Repeat faults, and check that a Quire server keeps its promises; the report is Markdown.

    make endurance ARGS="faults"                           all four parts: three quarters of an hour
    make endurance ARGS="faults --parts drains --drains 10"
    make endurance ARGS="faults --parts storm --storm 50 --replicas 2"
    make endurance ARGS="faults --report faults.md"
    .ray/bin/python tests/endurance faults --parts storm --storm 200 --replicas 2 --on-ray

Starts `quire serve demo` as often as needed. The promises; the status is 1 if one is broken:

    kills    The engine's process is killed (SIGKILL) at random moments, while 16 requests of all kinds run or
             wait: chats, completions, tools, grammars, log-probabilities, several choices, most of them
             streams. Each goes on in the next engine, which starts by itself, and is answered in full with
             the bits of a server that was not killed; 3 more that come while there is no engine may be
             refused. Then no block of the KV cache is held. At the tenth death a server gives up and ends
             with status 1, as the first one here does: a supervisor would start another, and so does this.
    storm    Engines that start again at once are killed 1.5 s at most after they are ready, one at a time,
             while 6 clients ask the same kinds of requests without end. Each is answered in full with the
             bits of before. Without engine requests are refused; with --replicas 2 none is. With --on-ray
             they are those of a deployment on a Ray cluster of this machine; its replicas are killed, too.
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
from endurance.storm import Stormer, Storms
from endurance.verdict import processor
from quire.bench.openai_api import Unusable
from quire.bench.report import columns

PARTS: dict[str, type[Killer | Stormer | Drainer | Aborter]] = {
    "kills": Killer,
    "storm": Stormer,
    "drains": Drainer,
    "aborts": Aborter,
}
Found = Kills | Storms | Drains | Aborts


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--kills", type=int, default=100, metavar="N", help="default: 100")
    add("--storm", type=int, default=100, metavar="N", help="kills; default: 100")
    add("--replicas", type=int, default=1, metavar="N", help="of the server in the storm (default: 1)")
    add("--on-ray", action="store_true", help="in the storm (see above; 'make ray' makes .ray)")
    add("--fronts", action="store_true", help="with --on-ray: kill the front, which cuts what it answers")
    add("--drains", type=int, default=100, metavar="N", help="default: 100")
    add("--aborts", type=int, default=10_000, metavar="N", help="default: 10,000")
    add("--seed", type=int, default=0, help="of the traffic and the moments (default: 0)")
    add("--report", type=Path, metavar="FILE", help="write it here, too")
    return parser.parse_args()


def show(line: str) -> None:
    """Write the progress to a terminal."""
    if sys.stderr.isatty():
        print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, log: Path) -> dict[str, tuple[Found, float]]:
    """Run the parts; return findings and seconds of each. What a pause of the machine spoilt is repeated."""
    found, clock = {}, Clock()
    watch = asyncio.create_task(clock.watch())
    for name in options.parts:
        begin_s = clock.now_s()
        more = (
            {"num_replicas": options.replicas, "on_ray": options.on_ray, "fronts": options.fronts}
            if name == "storm"
            else {}
        )
        part = PARTS[name](getattr(options, name), options.seed, log, clock, show, **more)
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
