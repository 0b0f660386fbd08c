"""The time of a step that verifies drafted tokens of one row, by their number, measured and predicted.

    python benchmarks/speculation_cost.py                            l1b and s135, int4 and int8
    python benchmarks/speculation_cost.py --models s135 --kinds int4 --context 2000

Steps of all sizes take turns. The law of steps is fitted to requests, 1 to 16 at a time, in which nothing is
drafted ("law before"), and then to half of the steps with drafts as well ("law after"), which the other half
of them tests. Random drafts are refused, so nothing depends on what is drafted. "gain at 0.7" is what such a
step would bring at an acceptance of 0.7 a token: expected tokens over the time relative to one token.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from peers import checkpoints
from step_law import Watching
from verdicts import calibrate

from quire.bench.report import columns
from quire.build import Built, build
from quire.config import EngineConfig
from quire.engine.step_law import StepLaw
from quire.roofline.calibrate import Calibration
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.sampling_params import SamplingParams
from quire.types import Admission, Grant, Row, Step, StepResult

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STREAMS = 16
SLOT = STREAMS  # one that the engine does not use
HEADING = ["model", "tokens", "step, ms", "over one token", "law before", "law after", "gain at 0.7"]


class Verified(NamedTuple):
    """A step that verified drafted tokens: its row, and its seconds."""

    start: int
    count: int
    device_s: float
    disturbed_s: float


def verify(built: Built, context: int, rounds: int, sizes: Sequence[int]) -> Iterator[Verified]:
    """Yield the steps of one sequence that draft all numbers of tokens in turns."""
    vocab_size, block_size = built.description.model.config.vocab_size, built.description.config.block_size
    draw = random.Random(3)
    num_blocks = -(-(context + rounds * len(sizes) * 2 + max(sizes)) // block_size)
    params = SamplingParams(max_tokens=None, temperature=0.0, seed=0, ignore_eos=True)
    prompt = tuple(draw.randrange(300, vocab_size) for _ in range(context))
    first = Step(
        1 << 30,
        (Row(SLOT, 0, context, prompt),),
        admitted=(Admission(SLOT, "verified", 0, params, (), context),),
        granted=(Grant(SLOT, 0, 0, tuple(range(num_blocks))),),
    )
    built.backend.launch(first).result()
    known = context + 1
    for number in range(rounds):
        order = draw.sample(sizes, len(sizes))
        for count in order:
            drafted = tuple(draw.randrange(300, vocab_size) for _ in range(count - 1))
            row = Row(SLOT, known - 1, count, num_logits=count, drafted=drafted)
            result: StepResult = built.backend.launch(Step(first.index + number, (row,))).result()
            device_s = result.ended_s - result.began_s
            yield Verified(known - 1, count, device_s, result.core_wait_s)
            known += len(result.rows[0].token_ids)


def features(law: StepLaw, step: Verified) -> tuple[float, ...]:
    return law.values([(step.start, step.count)], step.count)


def measure(name: str, config: EngineConfig, options: argparse.Namespace) -> list[list[str]]:
    """Return the table's rows of a model."""
    built = build(config, measuring=lambda: print("measuring this machine", flush=True))
    if built.ceilings is None:
        raise SystemExit("this machine has no ceilings")
    calibration = Calibration(law_at_the_roof(fold_costs(built.description), built.ceilings))
    built.engine.runner = watching = Watching(built)
    calibrate(built.engine, 1)
    before = calibration.law()
    for one in watching.measured:
        values = before.values(one.rows, one.num_logits)
        calibration.add(values, one.device_s, one.host_s, one.disturbed_s)
    before = calibration.law()
    found = list(verify(built, options.context, 2 * options.rounds, options.tokens))
    half = len(found) // 2
    for step in found[:half]:
        calibration.add(features(before, step), step.device_s, 0.0, step.disturbed_s)
    after, rows = calibration.law(), []
    seconds = {count: _median(found[half:], count) for count in options.tokens}
    for count in options.tokens:
        tested = [step for step in found[half:] if step.count == count]
        errors = [
            statistics.median(law.seconds(features(law, step)) for step in tested) / seconds[count] - 1
            for law in (before, after)
        ]
        over = seconds[count] / seconds[options.tokens[0]]
        expected = sum(0.7**index for index in range(count))
        figures = [f"{1e3 * seconds[count]:.2f}", f"{over:.2f}", *(f"{error:+.1%}" for error in errors)]
        rows.append([name, f"{count}", *figures, f"{expected / over:.2f}"])
        print("  ".join(rows[-1]), flush=True)
    return rows


def _median(found: Sequence[Verified], count: int) -> float:
    return statistics.median(step.device_s - step.disturbed_s for step in found if step.count == count)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    shapes = sorted(checkpoints.SHAPES)
    usual = ["l1b", "s135"]
    parser.add_argument("--models", nargs="+", default=usual, choices=shapes, help="default: l1b s135")
    kinds = ("int4", "int8", "bf16")
    parser.add_argument("--kinds", nargs="+", default=kinds[:2], choices=kinds, help="default: int4 int8")
    shown = " ".join(map(str, TOKENS))
    words = f"of a row, one of them known; default: {shown}"
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="N", help=words)
    words = "tokens before the row; default: 200"
    parser.add_argument("--context", type=int, default=200, metavar="N", help=words)
    words = "of each half of the steps with drafts; default: 10"
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help=words)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    checkpoints.add_work_option(parser)
    options = parser.parse_args()
    rows = [HEADING]
    for model in options.models:
        for kind in options.kinds:
            config: dict[str, Any] = {"quantization": kind} if kind != "bf16" else {}
            config |= {"max_num_seqs": STREAMS + 1, "kv_cache_memory_bytes": 1 << 30, "speculative": "off"}
            path = str(checkpoints.make(model, options.work))
            rows += measure(
                f"{model} {kind}", EngineConfig(model=path, num_threads=options.threads, **config), options
            )
    print("\n" + columns(rows))


if __name__ == "__main__":
    main()
