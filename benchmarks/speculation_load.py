"""Loads of 1 to 64 streams with drafts and without: throughput, and how evenly tokens come.

    python benchmarks/speculation_load.py --model demo
    python benchmarks/speculation_load.py --model s135 --mixes real random --data TEXTS --tokenizer LLAMA_2

Two engines, one with drafts and one without, each in a process of its own, get the same loads in turns: as
many requests at a time as there are streams, for about --seconds. Answers are compared; they must be equal.

    stories    the demo model tells stories that differ in their subjects, and answers in JSON after a schema
    random     prompts and answers of random tokens, in which nothing repeats
    real       real texts that a model of random weights is made to say (see speculation_text.py): programs
               that are completed, repeated and edited, and grade-school problems

Of each pair of runs, the ratio with drafts to without of: tokens a second, from the first request to the
last; the 99th percentile of the times between two chunks of a stream, in milliseconds; and that of the time
per token of an answer. A chunk with drafts may be several tokens: chunks may come later while tokens come
earlier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers import checkpoints
from speculating import texts
from speculating.engines import Asked, EngineProcess, Run

from quire.bench.metrics import percentile
from quire.bench.report import columns
from quire.config import EngineConfig
from quire.description import describe
from quire.frontend import Frontend
from quire.sampling_params import StructuredOutputsParams

STREAMS = (1, 2, 4, 8, 16, 32, 64)
SUBJECTS = ("fox", "lantern", "boat", "bear", "key", "garden", "bird", "drum", "river", "hat", "moon", "cat")
KINDS_OF = ("red", "small", "old", "happy", "quiet", "golden", "lost", "brave")
ANSWER, PROMPT = 128, 96  # tokens of random texts
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
HEADING = ["streams", "mix", "tokens/s off", "on", "ratio", "chunk gap p99 off", "on", "ratio"]
HEADING += ["time per token p99 off", "on", "ratio", "accepted"]


def stories(options: argparse.Namespace) -> Iterator[Asked]:
    """Yield requests of the demo model, every third to be answered in JSON."""
    description = describe(EngineConfig(model="demo"))
    longest = description.longest_context
    frontend = Frontend(
        description.source, description.model, max_model_len=longest, longest_context=longest, seed=0
    )
    person = frontend.grammars.compile(StructuredOutputsParams(json=PERSON))
    told = itertools.product(KINDS_OF, itertools.permutations(SUBJECTS, 2))
    for number, (kind, (one, other)) in enumerate(told):
        if number % 3 == 2:
            question, grammar = f"Describe a person with a {kind} {one} and a {other} as JSON.", person
        else:
            question, grammar = f"Tell me a story about a {kind} {one} and a {other}.", ""
        prompt = frontend.encode_chat([{"role": "user", "content": question}]).token_ids
        params = {"temperature": 0.8 if number % 2 else 0.0}
        yield Asked(prompt, num_tokens=200, eos=frontend.eos_token_ids, grammar=grammar, params=params)
    frontend.close()


def noise(options: argparse.Namespace) -> Iterator[Asked]:
    """Yield requests of random tokens, without end."""
    draw = random.Random(1)
    vocab_size = checkpoints.SHAPES[options.model].vocab
    while True:
        words = [draw.randrange(300, vocab_size) for _ in range(PROMPT + ANSWER)]
        yield Asked(tuple(words[:PROMPT]), tuple(words[PROMPT:]))


def real(options: argparse.Namespace) -> Iterator[Asked]:
    """Yield real texts of all kinds in turns, until those of one kind are used up."""
    encode = texts.reader(options.tokenizer)
    kinds = [texts.texts(kind, options.data, encode) for kind in texts.KINDS]
    for several in zip(*kinds, strict=False):
        yield from (Asked(text.prompt, text.answer) for text in several)


MIXES = {"stories": stories, "random": noise, "real": real}


class Pairs:
    """Runs of one mix at one number of streams, with drafts and without."""

    def __init__(self, mix: str, streams: int) -> None:
        self.mix, self.streams = mix, streams
        self.runs: list[tuple[Run, Run]] = []  # with drafts, without

    def row(self) -> list[str]:
        """Return the table's row: medians, and of ratios the least and the largest, too."""
        row = [f"{self.streams}", self.mix]
        for measure, scale, digits in ((Run.tokens_s.fget, 1, 0), (chunk_gap_s, 1e3, 1), (token_s, 1e3, 2)):
            pairs = [(measure(on), measure(off)) for on, off in self.runs]
            ratios = sorted(on / off for on, off in pairs)
            for way in (1, 0):
                row.append(f"{scale * statistics.median(pair[way] for pair in pairs):,.{digits}f}")
            median = statistics.median(ratios)
            row.append(f"**{median:.3f}** ({ratios[0]:.3f} to {ratios[-1]:.3f})")
        answers = [answer for on, _ in self.runs for answer in on.answers]
        drafted = sum(answer.num_drafted for answer in answers)
        return [*row, f"{sum(answer.num_accepted for answer in answers):,} of {drafted:,}"]


def chunk_gap_s(run: Run) -> float:
    """Return the 99th percentile of the times between two chunks of a stream."""
    return percentile(sorted(gap for answer in run.answers for gap in answer.gaps_s), 99)


def token_s(run: Run) -> float:
    """Return the 99th percentile of the mean times between the tokens of an answer."""
    means = sorted(answer.decode_s / answer.num_timed for answer in run.answers if answer.num_timed > 0)
    return percentile(means, 99)


def in_turns(
    on: EngineProcess, off: EngineProcess, requests: Sequence[Asked], streams: int, salts: Iterator[str]
) -> tuple[Run, Run]:
    """Return the runs of both engines, which take turns to be the first."""
    salt = next(salts)
    own = [replace(one, salt=salt) for one in requests]
    order = (on, off) if int(salt) % 2 else (off, on)
    runs = {engine.name: engine.run(own, streams) for engine in order}
    if [one.digest for one in runs["on"].answers] != [one.digest for one in runs["off"].answers]:
        raise SystemExit("answers with drafts and without differ")
    return runs["on"], runs["off"]


def measure(options: argparse.Namespace) -> Iterator[Pairs]:
    """Yield the runs of each mix at each number of streams."""
    config: dict[str, Any] = {
        "model": "demo" if options.model == "demo" else checkpoints.make(options.model, options.work),
        "max_num_seqs": max(options.streams),
        "max_num_prefill_tokens": PREFILL_TOKENS,
        "kv_cache_memory_bytes": 3 << 30,
    }
    if options.kind != "bf16" and options.model != "demo":
        config["quantization"] = options.kind
    if options.threads:
        config["num_threads"] = options.threads
    on = EngineProcess("on", **config, speculative=options.speculative)
    off = EngineProcess("off", **config, speculative="off")
    salts = map(str, itertools.count(1))
    for mix in options.mixes:
        endless = itertools.cycle(MIXES[mix](options))
        for streams in options.streams:
            warm = list(itertools.islice(endless, 2 * streams))
            _, slow = in_turns(on, off, warm, streams, salts)
            mean = slow.num_tokens / len(warm)
            count = max(2 * streams, round(options.seconds * slow.tokens_s / mean))
            pairs = Pairs(mix, streams)
            for _ in range(options.rounds):
                requests = list(itertools.islice(endless, count))
                pairs.runs.append(in_turns(on, off, requests, streams, salts))
            yield pairs
    on.close()
    off.close()


PREFILL_TOKENS = 48  # the default of `quire serve`


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    models = ["demo", *sorted(checkpoints.SHAPES)]
    parser.add_argument("--model", default="demo", choices=models, help="default: demo")
    words = "of the other models; default: int4"
    parser.add_argument("--kind", default="int4", choices=("int4", "int8", "bf16"), help=words)
    words = "default: stories for demo, random for the others"
    parser.add_argument("--mixes", nargs="+", choices=MIXES, help=words)
    words = "drafts of the first engine, an option of `quire serve`; default: auto"
    parser.add_argument("--speculative", default="auto", metavar="HOW", help=words)
    shown = " ".join(map(str, STREAMS))
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS, help=f"default: {shown}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of a run; default: 4")
    texts.add_options(parser, required=False)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all answers here")
    options = parser.parse_args()
    options.mixes = options.mixes or ["stories" if options.model == "demo" else "random"]
    if ("stories" in options.mixes) != (options.model == "demo"):
        parser.error("stories are told by the demo model, which tells nothing else")
    if "real" in options.mixes and not (options.data and options.tokenizer):
        parser.error("real texts need --data and --tokenizer")
    rows, figures = [HEADING], {}
    for pairs in measure(options):
        rows.append(pairs.row())
        print("  ".join(rows[-1]), flush=True)
        figures[f"{pairs.mix} {pairs.streams}"] = [[asdict(run) for run in pair] for pair in pairs.runs]
    print("\n" + columns(rows))
    if options.json:
        options.json.write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
