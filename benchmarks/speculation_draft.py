"""Decoding of one stream with a draft model, against no drafts and against the gain that the rule predicts.

    python benchmarks/speculation_draft.py                           1B random weights and a small draft
    python benchmarks/speculation_draft.py --right 0.6 0.8 0.95
    python benchmarks/speculation_draft.py --model demo              the demo model and its own draft

Two engines, each in a process of its own, get every request in turns. The models of random weights say random
texts, in which nothing repeats (speculation_text.py has real ones), and each token that the draft model
proposes is replaced by the text's with the probability --right, as drawn from a seed; both models compute
what they would. The demo model and its draft are trained: what it tells decides.

"pass / step" is the time of a pass of the draft model over that of a step without drafts. "ratio" compares
the times from first to last token of all answers. "gain" is what the receipts say: by the law of steps, how
much longer the same tokens would have taken; "error" that of the gain, relative to the ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers import checkpoints
from speculating.engines import Asked, EngineProcess, Run
from speculation_load import stories

from quire.bench.report import columns

DRAFTS = {"l1b": "l1b-draft", "demo": "demo-draft"}
PROMPT, ANSWER = 64, 96
WARM_S = 16.0  # of both engines before: the law of steps is fitted in that time
HEADING = ["drafts right", "tokens", "off, ms/token", "on", "ratio", "gain", "error", "pass / step"]
HEADING += ["tokens a step", "accepted"]


def noise(vocab_size: int) -> Iterator[Asked]:
    """Yield requests of random tokens, without end."""
    draw = random.Random(2)
    while True:
        words = [draw.randrange(300, vocab_size) for _ in range(PROMPT + ANSWER)]
        yield Asked(tuple(words[:PROMPT]), tuple(words[PROMPT:]))


def row(name: str, runs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Return the table's row of pairs of runs, with drafts and without."""
    pairs = [(on.answers[0], off.answers[0]) for on, off in runs]
    tokens = sum(on.num_timed for on, _ in pairs)
    on_s, off_s = (sum(pair[way].decode_s for pair in pairs) for way in (0, 1))
    gain = (on_s + sum(on.saved_s for on, _ in pairs)) / on_s
    passes, draft_s = sum(on.num_passes for on, _ in runs), sum(on.draft_s for on, _ in runs)
    share = draft_s / passes / (off_s / tokens) if passes else 0.0
    drafted, accepted = (
        sum(getattr(on, name) for on, _ in pairs) for name in ("num_drafted", "num_accepted")
    )
    chunks = sum(len(on.gaps_s) for on, _ in pairs)
    return [
        name,
        f"{tokens:,}",
        f"{1e3 * off_s / tokens:.2f}",
        f"{1e3 * on_s / tokens:.2f}",
        f"**{off_s / on_s:.2f}**",
        f"{gain:.2f}",
        f"{gain * on_s / off_s - 1:+.1%}",
        f"1/{1 / share:.1f}" if share else "",
        f"{tokens / chunks:.2f}",
        f"{accepted:,} of {drafted:,}",
    ]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, list[tuple[Run, Run]]]]:
    """Yield the pairs of runs for each probability, with its name."""
    config: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    trained = options.model == "demo"
    if trained:
        config, draft = config | {"model": "demo"}, DRAFTS["demo"]
    else:
        config |= {"model": checkpoints.make(options.model, options.work), "quantization": options.kind}
        draft = str(checkpoints.make(DRAFTS[options.model], options.work))
    if options.threads:
        config["num_threads"] = options.threads
    on = EngineProcess("on", **config, speculative=options.draft or draft)
    off = EngineProcess("off", **config, speculative="off")
    told = itertools.cycle(request for request in stories(options) if not request.grammar)
    requests = told if trained else noise(checkpoints.SHAPES[options.model].vocab)
    salts = map(str, itertools.count())  # so that nothing is drafted from earlier answers
    for right in [None] if trained else options.right:
        runs: list[tuple[Run, Run]] = []
        begin_s = time.monotonic()
        while len(runs) < options.count:
            salt = next(salts)
            request = replace(next(requests), salt=salt)
            order = (on, off) if int(salt) % 2 else (off, on)
            pair = {engine.name: engine.run([request], right=right) for engine in order}
            if pair["on"].answers[0].digest != pair["off"].answers[0].digest:
                raise SystemExit("answers with drafts and without differ")
            if time.monotonic() - begin_s >= WARM_S:
                runs.append((pair["on"], pair["off"]))
        yield "trained" if right is None else f"{right:.0%}", runs
    on.close()
    off.close()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="l1b", choices=DRAFTS, help="default: l1b")
    words = "of the model of random weights; default: int4"
    parser.add_argument("--kind", default="int4", choices=("int4", "int8"), help=words)
    words = "draft model; default: one of the same vocabulary, for demo its own"
    parser.add_argument("--draft", metavar="MODEL", help=words)
    words = "probabilities that a proposed token is right; default: 0.7 0.85"
    parser.add_argument("--right", type=float, nargs="+", default=[0.7, 0.85], metavar="P", help=words)
    parser.add_argument("--count", type=int, default=16, metavar="N", help="answers; default: 16")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all answers here")
    options = parser.parse_args()
    rows, figures = [HEADING], {}
    for name, runs in measure(options):
        rows.append(row(name, runs))
        print("  ".join(rows[-1]), flush=True)
        figures[name] = [[asdict(run) for run in pair] for pair in runs]
    print("\n" + columns(rows))
    if options.json:
        options.json.write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
