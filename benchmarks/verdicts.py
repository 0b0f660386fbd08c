"""Verdicts of steps: whether planted causes are named, and what judging every step costs.

    python benchmarks/verdicts.py                      planted causes: 135M random weights in int4, and demo
    python benchmarks/verdicts.py --cost --rounds 20   tokens a second with and without a meter

Causes are planted in the live engine: a prompt of 512 tokens; one stream with a long context; 5 ms more of
masks in each step; 20 ms of the host between two steps; other programs on one core. At least 95% of the
steps with a cause must be named after it. Before, a mixture of steps calibrates the law.

Programs that happen to run beside this one are a cause, too. By the kernel's own count of the time that each
thread waited for a core (schedstat), steps in which one waited more than half of the time are to be named
"waiting", whatever was planted; where it waited a tenth to a half, the step is set aside. On a machine that
does nothing else there are none.

--cost generates with a meter that is switched on and off after every 32 steps, and compares the times of
steps that nothing disturbs (the 10th percentile), round by round. Both pay for the times that the core
measures, a microsecond a step. Fits of the law, one in 5 s at most, are not in it; they take 2 to 4 ms. The
processor time of judging depends less on what else runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from peers import checkpoints

from quire.build import Built, build
from quire.config import EngineConfig
from quire.engine.engine import Engine, PendingStep
from quire.engine.meter import Times, Verdict
from quire.engine.step_law import StepLaw
from quire.roofline.meter import StepMeter
from quire.roofline.verdicts import table
from quire.sampling_params import SamplingParams
from quire.step_record import Record
from quire.types import NewRequest, Step

SLEEP_S, HOST_S = 0.005, 0.02
NEIGHBOURS = 4  # programs on one core
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
NAMED = 0.95
BLOCK = 32  # steps with or without a meter
DISTURBED, MOSTLY = 0.1, 0.5  # of the time of a step
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Model:
    """A model to judge, the length of its long context, and what may bound it there."""

    name: str
    quantization: str | None
    long_context: int
    decoding: frozenset[str]
    prompts: frozenset[str]


# Demo's weights fit into the last cache; reading them takes less than the barriers between its ops.
MODELS = (
    Model("s135", "int4", 6000, frozenset({"memory"}), frozenset({"int8"})),
    Model("demo", None, 800, frozenset({"overhead", "cache"}), frozenset({"bf16", "f32"})),
)


class Runner:
    """Launches steps on a backend with what is planted; without prefix caching, all prompts are computed."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.slow_masks = False

    def launch(self, step: Step) -> PendingStep:
        return self.built.backend.launch(step, slow_masks if self.slow_masks else None)


def slow_masks() -> dict[int, object]:
    time.sleep(SLEEP_S)
    return {}


def request(prompt: int, output: int) -> NewRequest:
    number = next(_NUMBERS)
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, seed=0)
    ids = tuple(300 + (7 * number + i) % 1000 for i in range(prompt))
    return NewRequest(f"r{number}", ids, params, arrival_s=time.monotonic())


@dataclass(frozen=True)
class Judged:
    """A step, and how long the thread of this process that waited longest for a core did so meanwhile."""

    record: Record
    waited_s: float

    def expected(self, planted: frozenset[str]) -> frozenset[str]:
        """The bounds that are right; none if it cannot be told."""
        share = self.waited_s / self.record.wall_s
        if DISTURBED <= share <= MOSTLY:
            return frozenset()
        if share < DISTURBED:
            return planted
        # A thread that waits for a core after it slept has slept longer, as far as masks and the host see.
        slept = planted & {"sampling", "overhead"}
        return slept | {"waiting"}


def run(engine: Engine, requests: Sequence[NewRequest], between_s: float = 0.0) -> list[Judged]:
    """The steps of requests that begin together."""
    for one in requests:
        engine.add(one)
    found = []
    while engine.has_work:
        before = waited_s()
        engine.step()
        waited = max(after - before.get(thread, 0.0) for thread, after in waited_s().items())
        found.append(Judged(engine.records[-1], waited))
        if between_s:
            time.sleep(between_s)
    return found


def waited_s() -> dict[str, float]:
    """The time that each thread of this process has waited for a core, as the kernel counts it."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


@contextmanager
def neighbours() -> Iterator[None]:
    """Programs that want the last core for themselves."""
    core = str(max(os.sched_getaffinity(0)))
    others = [subprocess.Popen([sys.executable, "-c", BUSY, core]) for _ in range(NEIGHBOURS)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def load(model: Model, work: Path) -> Built:
    path = model.name if model.name == "demo" else str(checkpoints.make(model.name, work))
    config = EngineConfig(
        model=path,
        quantization=model.quantization,
        max_model_len=model.long_context + 120,
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculative="off",
    )
    built = build(config, measuring=lambda: print("measuring this machine", flush=True))
    if built.ceilings is None:
        raise SystemExit("this machine has no ceilings")
    print(f"\n{model.name} {model.quantization or ''}: {built.ceilings}", flush=True)
    return built


def calibrate(engine: Engine, rounds: int = 3) -> None:
    """Compute steps of all kinds, longer than FIT_S of the meter."""
    for _ in range(rounds):
        for streams, prompt in ((1, 30), (4, 200), (16, 60), (2, 512)):
            run(engine, [request(prompt, 60) for _ in range(streams)])


def planted(model: Model, work: Path) -> bool:
    """Plant each cause; return True if enough steps were named after it."""
    built = load(model, work)
    engine = built.engine
    engine.runner = runner = Runner(built)
    calibrate(engine)
    decoding, prompts = model.decoding, model.prompts
    good = True

    def judge(cause: str, bounds: frozenset[str], steps: Sequence[Judged]) -> None:
        nonlocal good
        clear = [(step.record, right) for step in steps if (right := step.expected(bounds))]
        alone = [step.record for step in steps if step.waited_s < DISTURBED * step.record.wall_s]
        share = sum(record.bound in right for record, right in clear) / max(1, len(clear))
        good = good and share >= NAMED
        print(f"{cause}: {share:.1%} of {len(clear):,} steps are named rightly", flush=True)
        by_plan = sum(record.bound in bounds for record in alone)
        print(f"    {by_plan} of {len(alone)} undisturbed ones {'/'.join(sorted(bounds))}; ", end="")
        print(
            f"{len(clear) - len(alone)} waited for a core, {len(steps) - len(clear)} are set aside",
            flush=True,
        )
        print("    " + table(step.record for step in steps).replace("\n", "\n    "), flush=True)

    steps = run(engine, [request(model.long_context, 120)])
    judge("long context alone", decoding, [step for step in steps if step.record.num_tokens == 1])
    count = 40
    steps = [step for _ in range(count) for step in run(engine, [request(512, 1)])]
    judge("a prompt of 512", prompts, steps)
    runner.slow_masks = True
    judge("5 ms more of masks", frozenset({"sampling"}), run(engine, [request(30, 300)])[1:])
    runner.slow_masks = False
    judge("a slow host", frozenset({"overhead"}), run(engine, [request(30, 100)], HOST_S)[3:])
    if model.name != "demo":  # whose steps are shorter than a slice of the core
        with neighbours():
            steps = [step for _ in range(count) for step in run(engine, [request(512, 1)])]
        judge("programs on one core", frozenset({"waiting"}), steps)
    return good


class Switched:
    """A meter that judges steps only while it is on."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter
        self.on = True
        self.judged: list[tuple[Step, Times]] | None = None  # kept if it is a list

    def judge(self, step: Step, times: Times) -> Verdict:
        if self.judged is not None:
            self.judged.append((step, times))
        return self.meter.judge(step, times) if self.on else Verdict()

    def new_law(self) -> StepLaw | None:
        return self.meter.new_law() if self.on else None


def cost(model: Model, work: Path, streams: int, rounds: int) -> None:
    """Print the ratio of tokens a second with a meter to those without, of adjacent blocks of steps."""
    built = load(model, work)
    engine = built.engine
    assert isinstance(engine.meter, StepMeter)
    engine.meter = meter = Switched(engine.meter)
    calibrate(engine, 1)
    ratios, without = [], []
    for _ in range(rounds):
        for one in [request(30, 640) for _ in range(streams)]:
            engine.add(one)
        while len(engine.step()) < streams:
            pass
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(600):
            meter.on = number // BLOCK % 2 == 0
            began_s = time.perf_counter()
            engine.step()
            times[meter.on].append(time.perf_counter() - began_s)
        while engine.has_work:
            engine.step()
        on_s, off_s = (statistics.quantiles(times[on], n=10)[0] for on in (True, False))
        ratios.append(off_s / on_s)
        without.append(streams / off_s)
    meter.judged = []
    run(engine, [request(30, 640) for _ in range(streams)])
    began_s = time.thread_time()
    for step, times_of in meter.judged:
        meter.meter.judge(step, times_of)
    judge_s = (time.thread_time() - began_s) / len(meter.judged)
    step_s = streams / statistics.median(without)
    print(
        f"{1e6 * judge_s:.1f} us of processor time to judge a step, {judge_s / step_s:.2%} of it", flush=True
    )
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{streams} streams: {statistics.median(without):,.0f} tokens/s in steps without a meter", flush=True
    )
    print(f"with it {median:.4f} times as many (quartiles of rounds {low:.4f} ... {high:.4f})", flush=True)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--models", nargs="+", choices=[one.name for one in MODELS])
    parser.add_argument("--cost", action="store_true", help="measure what judging costs instead")
    parser.add_argument("--rounds", type=int, default=12)
    checkpoints.add_work_option(parser)
    asked = parser.parse_args()
    models = [one for one in MODELS if asked.models is None or one.name in asked.models]
    if asked.cost:
        for model in models:
            cost(model, asked.work, 1 if model.name == "demo" else 16, asked.rounds)
        return
    found = [planted(model, asked.work) for model in models]
    raise SystemExit(0 if all(found) else f"less than {NAMED:.0%} of the steps of a cause were named")


if __name__ == "__main__":
    main()
