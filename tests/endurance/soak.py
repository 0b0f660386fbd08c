"""Load a Quire server with mixed traffic for hours, and check its promises; the report is Markdown.

    make endurance ARGS="soak --minutes 30 --report soak.md"
    make endurance ARGS="soak --minutes 5 --kill-every 30"      the engine's process is killed twice a minute
    make endurance ARGS="soak -- --max-num-batched-tokens 64"     the rest goes to `quire serve`

Starts `quire serve demo` with a KV cache so small that requests are preempted, and keeps --streams requests
open: chats and completions, streamed and not, with several choices, logprobs, echo, penalties, seeds, token
ids, tools and the other endpoints; 20% are hung up on at a random moment, 10% are held to a grammar, 5% are
invalid. The promises; the status is 1 if one is broken:

    answers      every answer is what its request asks for; what is invalid is refused as it must be
    hung         every request ends within --patience
    golden       prompts sent every minute amid the traffic give what they gave on the idle server: the same
                 texts, token ids and bits of logprobs
    blocks       when nothing runs, no block of the KV cache is held
    memory       neither process grows by more than --max-slope MB an hour after --warm-up
    descriptors  and threads are as many at the end as after the warm-up
    latency      the median time per token of the last fifth is that of the first, within --max-drift
    engine       it dies only by our hand; then open streams end with an error within a second, and the
                 server is ready again
    preemption   there was some: else this was no test of it
    drain        SIGTERM at the end harms nothing; the log has no traceback
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from serving import processes
from serving.processes import ServerProcess

from endurance.soaking import Settings, Soak
from endurance.verdict import report
from quire.bench.openai_api import Unusable

CACHE = "4M"  # for about 2,000 tokens of the demo model
NUM_SEQS = 16


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to the server."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- OPTIONS OF THE SERVER]",
    )
    add = parser.add_argument
    add("--model", default="demo", help="default: demo")
    add("--minutes", type=float, default=30, metavar="N", help="of traffic (default: 30)")
    add("--streams", type=int, default=24, metavar="N", help="requests at once (default: 24)")
    add(
        "--output-tokens",
        type=int,
        default=160,
        metavar="N",
        help="of long answers (default: 160)",
    )
    add("--prompt-words", type=int, default=120, metavar="N", help="of the longest prompt (default: 120)")
    add("--kill-every", type=float, metavar="S", help="kill the engine's process (default: never)")
    add("--idle-every", type=float, default=300, metavar="S", help="stop and look for leaks (default: 300)")
    add("--golden-every", type=float, default=60, metavar="S", help="default: 60")
    add("--warm-up", type=float, metavar="S", help="not judged (default: a fifth, at most 300)")
    add("--patience", type=float, default=120, metavar="S", help="for any request (default: 120)")
    add("--max-slope", type=float, default=1.0, metavar="MB", help="an hour (default: 1)")
    add("--max-drift", type=float, default=0.25, metavar="R", help="of the time per token (default: 0.25)")
    add("--seed", type=int, default=0, help="of the traffic (default: 0)")
    add("--report", type=Path, metavar="FILE", help="write it here, too")
    add("--json", type=Path, metavar="FILE", help="write all samples here")
    add("--log", type=Path, metavar="FILE", help="of the server (default: a temporary file)")
    arguments = sys.argv[1:]
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:place]), arguments[place + 1 :]


async def run(options: argparse.Namespace, more: list[str], log: Path) -> Soak:
    """Soak, and end the server: how it ends is judged, too."""
    seconds = 60 * options.minutes
    settings = Settings(
        seconds=seconds,
        streams=options.streams,
        num_prompt_words=options.prompt_words,
        num_output_tokens=options.output_tokens,
        kill_every_s=options.kill_every,
        idle_every_s=options.idle_every,
        golden_every_s=options.golden_every,
        warm_up_s=options.warm_up if options.warm_up is not None else min(seconds / 5, 300.0),
        patience_s=options.patience,
        max_slope_mb=options.max_slope,
        max_drift=options.max_drift,
        seed=options.seed,
    )
    usual = ["--max-num-seqs", str(NUM_SEQS), "--kv-cache-memory-bytes", CACHE]
    server = ServerProcess([options.model, *usual, *more], log)
    async with server:
        soak = Soak(server, settings)
        await soak.run()
        soak.exit_status = await server.stop()
    soak.log = log.read_text("utf-8", "replace")
    return soak


def main() -> None:
    options, more = read_options()
    log = options.log or Path(tempfile.mkstemp(prefix="quire-soak-", suffix=".log")[1])
    begin_s = time.time()
    try:
        soak = processes.run(run(options, more, log))
    except Unusable as problem:
        sys.exit(f"{problem}\nlog: {log}")
    promises, text = report(soak, begin_s)
    if options.report:
        options.report.write_text(text, "utf-8")
    if options.json:
        options.json.write_text(json.dumps(soak.as_json(), indent=1) + "\n", "utf-8")
    print(text)
    broken = [promise.name for promise in promises if not promise.is_kept]
    if broken:
        sys.exit(f"broken: {', '.join(broken)}; log: {log}")
    if not options.log:
        log.unlink()
