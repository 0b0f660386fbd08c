"""Load several replicas for hours while engines die, are replaced, stopped and started; a Markdown report.

    make endurance ARGS="replicas --minutes 60 --folder soak"
    make endurance ARGS="replicas --folder soak --resume"        goes on with one that was interrupted
    make endurance ARGS="replicas --folder soak --show"          what is known so far, while it runs
    make endurance ARGS="replicas --folder soak -- --max-model-len 1024"   the rest goes to `quire serve`

Starts `quire serve demo --replicas N` with the mixture of requests of the soak. For --capacity-s all streams
ask as fast as they can; then requests come at random, --load times as many a second. Every --fault-every
seconds comes the next fault: an engine is killed, a replica is replaced, one is stopped, it is started, an
engine is killed, all are replaced. The promises; the status is 1 if one is broken:

    answers   every answer is whole and what its request asks for; no fault excuses an error
    hung      every request ends within --patience
    golden    prompts sent every minute, amid faults, give what they gave on the idle server, to the bit
    blocks    when nothing runs, no block of any KV cache is held
    faults    every operation succeeds, and all replicas are ready again
    memory    the server does not grow by more than --max-slope MB an hour: the least slope that fits with
              95%, of medians of a minute (engines do not live long enough)
    drain     SIGTERM at the end harms nothing; the log has no traceback

The folder has the state of each session, written every 15 s, and the log of its server.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from serving import processes

from endurance.replica_soak import ReplicaServer, ReplicaSoak
from endurance.replica_verdict import report
from endurance.soak import CACHE, NUM_SEQS
from endurance.soaking import Settings
from quire.bench.openai_api import Unusable


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to the server."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --folder DIR [options] [-- OPTIONS OF THE SERVER]",
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="for states, logs and the report")
    add("--resume", action="store_true", help="go on for the rest of the time, with the options of before")
    add("--show", action="store_true", help="report what is known, and start nothing")
    add("--replicas", type=int, default=2, metavar="N", help="default: 2")
    add("--minutes", type=float, default=60, metavar="N", help="of traffic, in all (default: 60)")
    add("--load", type=float, default=0.7, metavar="R", help="of the capacity found (default: 0.7)")
    add("--capacity-s", type=float, default=30, metavar="S", help="to find the capacity (default: 30)")
    add("--streams", type=int, default=24, metavar="N", help="most requests at once (default: 24)")
    add("--fault-every", type=float, default=30, metavar="S", help="default: 30")
    add("--idle-every", type=float, default=300, metavar="S", help="stop and look for leaks (default: 300)")
    add("--golden-every", type=float, default=60, metavar="S", help="default: 60")
    add("--patience", type=float, default=240, metavar="S", help="for any request (default: 240)")
    add("--max-slope", type=float, default=1.0, metavar="MB", help="an hour (default: 1)")
    add("--seed", type=int, default=0, help="of the traffic (default: 0)")
    arguments = sys.argv[1:]
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:place]), arguments[place + 1 :]


def sessions_of(folder: Path) -> list[dict[str, Any]]:
    """Return the states of the sessions in a folder, in order."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("session-*.json"))]


def prepared(options: argparse.Namespace, more: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the whole run: those of its beginning, if it is resumed or shown."""
    folder = options.folder
    file, named = folder / "options.json", {"resume": options.resume, "show": options.show, "folder": folder}
    if options.resume or options.show:
        if not file.exists():
            sys.exit(f"{folder} has no soak")
        kept = json.loads(file.read_text("utf-8"))
        return argparse.Namespace(**kept["options"], **named), kept["more"]
    folder.mkdir(parents=True, exist_ok=True)
    if file.exists():
        sys.exit(f"{folder} has a soak: go on with --resume, or name another folder")
    kept = {name: value for name, value in vars(options).items() if name not in named}
    file.write_text(json.dumps({"options": kept, "more": more}), "utf-8")
    return options, more


async def run(options: argparse.Namespace, more: list[str], seconds: float, number: int) -> None:
    """Run one session, and end its server."""
    settings = Settings(
        seconds=seconds,
        streams=options.streams,
        num_prompt_words=120,
        num_output_tokens=160,
        kill_every_s=options.fault_every,
        idle_every_s=options.idle_every,
        golden_every_s=options.golden_every,
        warm_up_s=min(seconds / 5, 300.0),
        patience_s=options.patience,
        max_slope_mb=options.max_slope,
        max_drift=0.0,
        seed=options.seed + number,
    )
    usual = ["--max-num-seqs", str(NUM_SEQS), "--kv-cache-memory-bytes", CACHE]
    arguments = ["demo", "--replicas", str(options.replicas), *usual, *more]
    name = f"session-{number:03}"
    log, state = options.folder / f"{name}.log", options.folder / f"{name}.json"
    async with ReplicaServer(arguments, log) as server:
        soak = ReplicaSoak(server, settings, options.replicas, options.load, options.capacity_s, state)
        await soak.run()
        soak.exit_status = await server.stop()
    soak.log = log.read_text("utf-8", "replace")
    soak.save()


def main() -> None:
    options, more = prepared(*read_options())
    before = sessions_of(options.folder)
    seconds = 60 * options.minutes - sum(one["seconds"] for one in before)
    if not options.show and seconds > 1:
        try:
            processes.run(run(options, more, seconds, len(before)))
        except Unusable as problem:
            sys.exit(f"{problem}\nlogs: {options.folder}")
    if not (sessions := sessions_of(options.folder)):
        sys.exit("nothing is known yet")
    promises, text = report(sessions, options.max_slope)
    (options.folder / "report.md").write_text(text, "utf-8")
    print(text)
    broken = [promise.name for promise in promises if not promise.is_kept]
    if broken:
        sys.exit(f"broken: {', '.join(broken)}; logs: {options.folder}")


if __name__ == "__main__":
    main()
