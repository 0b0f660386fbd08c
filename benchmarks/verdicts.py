"""Verdicts of steps: whether planted causes are named, and what judging every step costs.

    python benchmarks/verdicts.py                      planted causes: 135M random weights in int4, and demo
    python benchmarks/verdicts.py --cost --rounds 20   tokens a second with and without a meter

Causes are planted in the live engine: a prompt of 512 tokens; one stream with a long context; 5 ms more of
masks in each step; 20 ms of the host between two steps; other programs on one core. At least 95% of the
steps with a cause must be named after it. Before, a mixture of steps calibrates the law.

Programs that happen to run beside this one are a cause, too. Steps that lost a tenth of their time to them,
by the kernel's own count of the time that threads waited for a core (schedstat), are set aside and counted,
unless that is what was planted. On a machine that does nothing else there are none.

--cost generates with a meter that is switched on and off after every 32 steps, and compares the times of
steps that nothing disturbs (the 10th percentile), round by round. Both pay for the times that the core
measures: a microsecond a step. Fits of the law, one in 5 s at most, are not in it; they take 2 to 4 ms.
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
from quire.types import NewRequest, Record, Step

SLEEP_S, HOST_S = 0.005, 0.02
NEIGHBOURS = 4  # programs on one core
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
NAMED = 0.95
BLOCK = 32  # steps with or without a meter
DISTURBED = 0.1  # of the time of a step
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
    """A step, and the time that threads of this process waited for a core while it was collected."""

    record: Record
    waited_s: float

    @property
    def disturbed(self) -> bool:
        return self.waited_s > DISTURBED * self.record.wall_s


def run(engine: Engine, requests: Sequence[NewRequest], between_s: float = 0.0) -> list[Judged]:
    """The steps of requests that begin together."""
    for one in requests:
        engine.add(one)
    found = []
    while engine.has_work:
        before_s = waited_s()
        engine.step()
        found.append(Judged(engine.records[-1], waited_s() - before_s))
        if between_s:
            time.sleep(between_s)
    return found


def waited_s() -> float:
    """The time that the threads of this process have waited for a core, as the kernel counts it."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


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

    def judge(cause: str, bounds: frozenset[str], steps: Sequence[Judged], alone: bool = True) -> None:
        nonlocal good
        kept = [step.record for step in steps if not (alone and step.disturbed)]
        share = sum(step.bound in bounds for step in kept) / len(kept) if kept else 0.0
        good = good and share >= NAMED
        aside = f", {len(steps) - len(kept)} set aside" if len(kept) < len(steps) else ""
        print(f"{cause}: {'/'.join(sorted(bounds))} {share:.1%} of {len(kept):,} steps{aside}", flush=True)
        print("    " + table(kept).replace("\n", "\n    "), flush=True)

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
        judge("programs on one core", frozenset({"waiting"}), steps, alone=False)
    return good


class Switched:
    """A meter that judges steps only while it is on."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter
        self.on = True

    def judge(self, step: Step, times: Times) -> Verdict:
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
    parser.add_argument("--work", type=Path, default=Path("/tmp/peers"), help="where checkpoints are made")
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
