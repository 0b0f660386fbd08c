"""The error of the calibrated law of a step: each step is predicted from the steps before it.

    python benchmarks/step_law.py                          135M random weights, int4, all cores
    python benchmarks/step_law.py --model moe --threads 1
    python benchmarks/step_law.py --model demo --kind bf16
    python benchmarks/step_law.py --sizes                  the law fitted to the median step of each size

Random requests run, 1 to 32 at a time, with prompts of 16 to 3,900 tokens in chunks of at most 512. Every
`--every` steps a law is fitted to the records so far; it predicts the steps that follow. The error of a step
is predicted over measured device seconds, less 1; that of the sum is of all steps together. A step is
disturbed if it waited for a core or for masks for more than 2% of its time, and judged without the wait.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from peers import checkpoints

from quire.build import Built, build
from quire.config import EngineConfig
from quire.engine.engine import PendingStep
from quire.roofline.calibrate import DISTURBED, Calibration
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.roofline.probe import ceilings
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Step, StepResult

MAX_PROMPT, WARM_STEPS = 3900, 100


class Measured(NamedTuple):
    """A step as it ran: its rows, its positions with logits, and its seconds."""

    rows: list[tuple[int, int]]
    num_logits: int
    device_s: float
    host_s: float
    disturbed_s: float


class Watching:
    """A runner that notes the steps it launches, and the times of their results."""

    def __init__(self, built: Built) -> None:
        self.measured: list[Measured] = []
        self._runner = built.runner
        self._ended_s = 0.0

    def launch(self, step: Step) -> PendingStep:
        pending = self._runner.launch(step)
        watching = self

        class Watched:
            def result(self) -> StepResult:
                result = pending.result()
                watching.note(step, result)
                return result

        return Watched()

    def note(self, step: Step, result: StepResult) -> None:
        host_s = max(0.0, result.began_s - self._ended_s) if self._ended_s else 0.0
        self._ended_s = result.ended_s
        rows = [(row.start, row.count) for row in step.rows]
        num_logits = sum(row.num_logits for row in step.rows)
        disturbed_s = result.core_wait_s + result.mask_s
        self.measured.append(Measured(rows, num_logits, result.ended_s - result.began_s, host_s, disturbed_s))


def steps(built: Built, count: int, seed: int) -> Iterator[Measured]:
    """Run random requests; yield each step."""
    engine, watching, rng = built.engine, Watching(built), random.Random(seed)
    engine.runner = watching
    running: set[str] = set()
    vocab_size = built.description.model.config.vocab_size
    wanted, number = 8, 0
    while number < count:
        if rng.random() < 0.03:
            wanted = rng.choice((1, 1, 2, 4, 8, 16, 32, rng.randrange(1, 33)))
        if not running or (len(running) < wanted and rng.random() < 0.3):
            name = f"{number}"
            longest = rng.choice((512, 512, 512, MAX_PROMPT))
            length = min(int(16 * (longest / 16) ** rng.random()), engine.scheduler.max_model_len - 128)
            words = tuple(rng.choices(range(vocab_size // 2), k=length))
            params = SamplingParams(max_tokens=rng.choice((4, 30, 120)), ignore_eos=True, seed=1)
            engine.add(NewRequest(name, words, params, time.monotonic()))
            running.add(name)
        running -= {output.request_id for output in engine.step() if output.finish_reason}
        yield from watching.measured
        number += len(watching.measured)
        watching.measured.clear()


def sizes(built: Built) -> Iterator[Measured]:
    """Yield the median step of each of many sizes: rows that decode after 16 tokens, and prompts alone."""
    engine, watching = built.engine, Watching(built)
    engine.runner = watching
    decode, prompts = (
        (*range(1, 11), 12, 14, 15, 16, 17, 20, 24, 25, 32),
        (16, 17, 24, 32, 48, 64, 128, 256, 512),
    )
    cases = [(rows, 16, 16, rows) for rows in decode] + [(1, length, 1, length) for length in prompts * 4]
    found: dict[tuple[int, int], list[Measured]] = {}
    for number, (rows, length, answer, num_tokens) in enumerate(cases):
        params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=1, temperature=0.0)
        for row in range(rows):
            words = tuple(1000 * row + 31 * number + word for word in range(length))
            engine.add(NewRequest(f"{number}-{row}", words, params, time.monotonic()))
        while engine.has_work:
            engine.step()
        steps_of = [step for step in watching.measured if sum(count for _, count in step.rows) == num_tokens]
        found.setdefault((rows, length), []).extend(steps_of)
        watching.measured.clear()
    for same in found.values():
        yield sorted(same, key=lambda step: step.device_s - step.disturbed_s)[len(same) // 2]


def report(name: str, expected: np.ndarray, seconds: np.ndarray) -> None:
    """Print the errors of predictions."""
    errors, total = np.abs(expected / seconds - 1), expected.sum() / seconds.sum() - 1
    print(
        f"{name:22} {len(seconds):5} steps: error of a step {np.median(errors):.1%} (median), "
        f"{np.quantile(errors, 0.9):.1%} (90th percentile); of the sum {total:+.1%}"
    )


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="s135", choices=["demo", *sorted(checkpoints.SHAPES)])
    parser.add_argument("--kind", default="int4", help="int4, int8 or bf16")
    parser.add_argument("--threads", type=int, help="default: one per core")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="steps from one law to the next")
    parser.add_argument("--sizes", action="store_true", help="fit the median step of each of many sizes")
    parser.add_argument("--seed", type=int, default=0)
    checkpoints.add_work_option(parser)
    asked = parser.parse_args()
    config = EngineConfig(
        model="demo" if asked.model == "demo" else str(checkpoints.make(asked.model, asked.work)),
        quantization=None if asked.kind == "bf16" else asked.kind,
        num_threads=asked.threads,
        max_num_seqs=32,
        kv_cache_memory_bytes=3 << 30,
        speculative="off",
    )
    built = build(config)
    device = built.description.device
    calibration = Calibration(law_at_the_roof(fold_costs(built.description), ceilings(device.loops())))
    if asked.sizes:
        medians = list(sizes(built))
        features = [calibration.law().values(step.rows, step.num_logits) for step in medians]
        for values, step in zip(features, medians, strict=True):
            calibration.add(values, step.device_s, step.host_s, step.disturbed_s)
        law, times = calibration.law(), np.array([step.device_s - step.disturbed_s for step in medians])
        report("each size", np.array([law.seconds(values) for values in features]), times)
        return
    law, predicted, found, fits_s = calibration.law(), [], [], []
    for number, step in enumerate(steps(built, asked.steps, asked.seed)):
        if number and number % asked.every == 0:
            began_s = time.perf_counter()
            law = calibration.law()
            fits_s.append(time.perf_counter() - began_s)
        values = law.values(step.rows, step.num_logits)
        if number >= WARM_STEPS:
            predicted.append(law.seconds(values))
            found.append(step)
        calibration.add(values, step.device_s, step.host_s, step.disturbed_s)
    seconds = np.array([step.device_s - step.disturbed_s for step in found])
    calm = np.array([step.disturbed_s <= DISTURBED * step.device_s for step in found])
    print(f"{asked.model} {asked.kind} on {device.in_words()}: {len(found)} steps")
    fit_ms = np.median(fits_s) * 1e3
    print(f"{1 - calm.mean():.0%} disturbed; {calibration.num_records} records, {fit_ms:.1f} ms a fit")
    several = np.array([len(step.rows) < sum(count for _, count in step.rows) for step in found])
    expected = np.array(predicted)
    for name, chosen in (
        ("all", seconds > 0),
        ("undisturbed", calm),
        ("undisturbed, decode", calm & ~several),
        ("undisturbed, prompts", calm & several),
    ):
        if chosen.any():
            report(name, expected[chosen], seconds[chosen])


if __name__ == "__main__":
    main()
