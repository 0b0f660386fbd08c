"""Decoding of one stream with drafts and without, of a model that is made to say real texts.

    python benchmarks/speculation_text.py --data TEXTS --tokenizer LLAMA_3
    python benchmarks/speculation_text.py --data TEXTS --tokenizer GPT_2 --model s135 --kind int8 --texts math

Two engines, each in a process of its own, get every text in turns. They compute a model of random weights, in
which only the text's next token may be chosen; drafting, the rule, verification and kernels are real. What is
accepted is thus replayed: a model that writes other texts accepts other drafts. Without drafts the same masks
are used.

"own" drafts come from the text before: each request has a salt of its own. "shared" ones come from --earlier
answers of the same kind, too. "ratio" compares the times from first to last token of all texts, "gain" is
what the receipts of the requests say it is, "worst" the least ratio of a text with at least 32 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import checkpoints
from speculating import texts
from speculating.engines import Answered, Asked, EngineProcess
from speculating.texts import KINDS, Text

from quire.bench.report import columns

LONG = 32  # tokens of texts whose ratio is looked at alone
WARM = 6  # texts before: the law of steps is fitted to those that were computed
HEADING = ["text", "drafts", "texts", "tokens", "off, ms/token", "on", "ratio", "gain", "worst", "accepted"]


def asked(text: Text, salt: str) -> Asked:
    return Asked(text.prompt, text.answer, salt=salt)


def in_turns(
    on: EngineProcess, off: EngineProcess, requests: Sequence[Asked]
) -> Iterator[tuple[Answered, Answered]]:
    """Yield the answers of both engines to each request, which take turns to be the first."""
    for number, request in enumerate(requests):
        order = (on, off) if number % 2 else (off, on)
        answers = {engine.name: engine.run([request]).answers[0] for engine in order}
        yield answers["on"], answers["off"]


def row(kind: str, drafts: str, pairs: Sequence[tuple[Answered, Answered]]) -> list[str]:
    """Return the table's row of a kind of texts."""
    tokens = sum(on.num_timed for on, _ in pairs)
    on_s, off_s = (sum(pair[way].decode_s for pair in pairs) for way in (0, 1))
    saved_s = sum(on.saved_s for on, _ in pairs)
    drafted, accepted = (
        sum(getattr(on, name) for on, _ in pairs) for name in ("num_drafted", "num_accepted")
    )
    worst = min((off.decode_s / on.decode_s for on, off in pairs if on.num_tokens >= LONG), default=1.0)
    return [
        kind,
        drafts,
        f"{len(pairs)}",
        f"{tokens:,}",
        f"{1e3 * off_s / tokens:.2f}",
        f"{1e3 * on_s / tokens:.2f}",
        f"**{off_s / on_s:.2f}**",
        f"{(on_s + saved_s) / on_s:.2f}",
        f"{worst:.2f}",
        f"{accepted:,} of {drafted:,}",
    ]


def measure(options: argparse.Namespace) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the rows of the table, and all figures."""
    encode = texts.reader(options.tokenizer)
    config: dict[str, Any] = {
        "model": checkpoints.make(options.model, options.work),
        "max_num_seqs": 4,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 1 << 30,
    }
    if options.kind != "bf16":
        config["quantization"] = options.kind
    if options.threads:
        config["num_threads"] = options.threads
    on, off = (EngineProcess(name, speculative=value, **config) for name, value in WAYS.items())
    rows, figures, salts = [HEADING], {}, map(str, itertools.count(1))
    for kind in options.texts:
        found = list(texts.texts(kind, options.data, encode))
        warm, chosen = found[:WARM], found[WARM : WARM + options.count]
        earlier = found[WARM + options.count :][: options.earlier]
        for text in warm:
            for engine in (on, off):
                engine.run([asked(text, next(salts))])
        for drafts in options.drafts:
            salt = "" if drafts == "own" else kind
            if salt:
                on.run([], earlier=[asked(text, salt) for text in earlier])
            requests = [asked(text, salt or next(salts)) for text in chosen]
            pairs = list(in_turns(on, off, requests))
            figures[f"{kind} {drafts}"] = [[asdict(one) for one in pair] for pair in pairs]
            rows.append(row(kind, drafts, pairs))
            print("  ".join(rows[-1]), flush=True)
    on.close()
    off.close()
    return rows, figures


WAYS = {"on": "auto", "off": "off"}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    texts.add_options(parser)
    parser.add_argument("--model", default="l1b", choices=sorted(checkpoints.SHAPES), help="default: l1b")
    parser.add_argument("--kind", default="int4", choices=("int4", "int8", "bf16"), help="default: int4")
    words = "; ".join(f"{name}: {what}" for name, (_, _, what) in KINDS.items())
    usual = ["repeat", "code", "math"]
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=usual, metavar="TEXT", help=words)
    ways = ("own", "shared")
    parser.add_argument("--drafts", nargs="+", choices=ways, default=ways, help="default: both, one by one")
    parser.add_argument("--count", type=int, default=24, metavar="N", help="texts of each kind; default: 24")
    words = "answers in the shared store, as far as there are more texts; default: 256"
    parser.add_argument("--earlier", type=int, default=256, metavar="N", help=words)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all answers here")
    options = parser.parse_args()
    rows, figures = measure(options)
    print("\n" + columns(rows))
    if options.json:
        options.json.write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
