"""Verdicts of steps: what bound each, its share of the roof, its predicted time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_runner import FakeRunner

from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine
from quire.engine.meter import Times
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.roofline.meter import RENEWAL_S, StepMeter, bound_of
from quire.roofline.verdicts import by_bound, share_in_words, table
from quire.sampling_params import SamplingParams
from quire.step_record import Record
from quire.types import Admission, NewRequest, Row, Step, StepResult

FEATURES = (*LEADING, Feature("positions"), Feature("pairs"))
# Seconds by feature: one, rows, tokens, logits, positions, pairs. Weights take 2 ms to read.
PRODUCTS = Stage((2e-3, 0, 0, 0, 0, 0), (0, 0, 1e-4, 0, 0, 0), "products", "memory", "int8")
ATTENTION = Stage((0, 0, 0, 0, 1e-6, 0), (0, 0, 0, 0, 0, 1e-8), "attention", "memory", "bf16")
OVERHEAD = (2e-4, 0, 0, 0, 0, 0)
LAW = StepLaw(FEATURES, (PRODUCTS, ATTENTION), OVERHEAD, (PRODUCTS, ATTENTION))


def law_times(factor: float, overhead: float = 1.0) -> StepLaw:
    """A law whose stages take `factor` times as long as those at the roof."""
    stages = tuple(
        one._replace(memory=scaled(one.memory, factor), arithmetic=scaled(one.arithmetic, factor))
        for one in LAW.stages
    )
    return LAW._replace(stages=stages, overhead=scaled(OVERHEAD, overhead))


def scaled(numbers: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * number for number in numbers)


class Machine(FakeRunner):
    """A runner on a clock of its own: steps take what a law says, 10% more or less, and what is planted."""

    def __init__(self, plant: Callable[[StepResult], StepResult], law: StepLaw = LAW, gap_s: float = 1e-4):
        super().__init__(4096, 16)
        self.plant = plant
        self.law = law
        self.gap_s = gap_s
        self.now_s = 100.0
        self.noise = random.Random(1)

    def compute(self, step: Step) -> StepResult:
        found = self.law.values([(row.start, row.count) for row in step.rows], len(step.rows))
        began_s = self.now_s + self.gap_s
        work_s = self.law.seconds(found) * self.noise.uniform(0.9, 1.1)
        result = replace(super().compute(step), began_s=began_s, ended_s=began_s + work_s, sampling_s=1e-5)
        result = self.plant(result)
        self.now_s = result.ended_s
        return result


def longer(result: StepResult, seconds: float, **parts: float) -> StepResult:
    return replace(result, ended_s=result.ended_s + seconds, **parts)


def nothing(result: StepResult) -> StepResult:
    return result


def sleep_in_sampling(result: StepResult) -> StepResult:
    return longer(result, 0.005, sampling_s=0.005)


def sleep_in_masks(result: StepResult) -> StepResult:
    return longer(result, 0.005, mask_s=0.005)


def lost_core(result: StepResult) -> StepResult:
    return longer(result, 0.004, core_wait_s=0.004)


def run(machine: Machine, prompt: int, max_tokens: int, meter: StepMeter | None = None) -> list[Record]:
    """The records of one request."""
    scheduler = Scheduler(
        groups=[BlockGroup(4096)],
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=20_000,
    )
    engine = Engine(
        scheduler, machine, clock=lambda: machine.now_s, meter=StepMeter(LAW) if meter is None else meter
    )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add(NewRequest("a", tuple(range(prompt)), params))
    while engine.has_work:
        engine.step()
    return list(engine.records)


def share_named(records: list[Record], bound: str) -> float:
    return sum(record.bound == bound for record in records) / len(records)


@pytest.mark.parametrize(
    ("bound", "machine"),
    [
        ("memory", Machine(nothing)),
        ("sampling", Machine(sleep_in_sampling)),
        ("sampling", Machine(sleep_in_masks)),
        ("waiting", Machine(lost_core)),
        ("overhead", Machine(nothing, gap_s=0.004)),
        ("overhead", Machine(nothing, law_times(0.9, overhead=20))),
    ],
    ids=["long context", "sleep in sampling", "sleep in masks", "lost core", "slow host", "slow steps"],
)
def test_a_planted_cause_of_decoding_is_named(bound: str, machine: Machine) -> None:
    meter = StepMeter(LAW if machine.law is LAW else machine.law)
    steps = run(machine, 100, 300, meter)[1:]
    assert share_named(steps, bound) >= 0.95


def test_prompts_are_bound_by_arithmetic_and_long_contexts_by_reading() -> None:
    steps = run(Machine(nothing), 512 * 20, 50)
    assert [step.bound for step in steps[:20]] == ["int8"] * 20
    assert share_named(steps[20:], "memory") == 1.0
    assert (
        share_named(run(Machine(nothing, law_times(4)), 512, 2, StepMeter(law_times(4)))[:1], "int8") == 1.0
    )


def test_a_prediction_that_is_continued_is_that_of_the_law() -> None:
    """As contexts grow by a token a step; the rows of other steps are predicted one by one."""
    machine = Machine(nothing)
    steps = run(machine, 700, 200)
    for position, step in enumerate(steps[2:], 700):
        assert step.predicted_s == pytest.approx(LAW.seconds(LAW.values([(position, 1)], 1)), rel=1e-9)
        assert 0.9 < step.roof_share * step.device_s / (step.predicted_s - OVERHEAD[0]) < 1.0001
    assert [step.num_tokens for step in steps[:2]] == [512, 188]
    assert steps[1].predicted_s == pytest.approx(LAW.seconds(LAW.values([(512, 188)], 1)), rel=1e-9)


def test_predictions_are_renewed() -> None:
    """When rows change, and after RENEWAL_S: a window that fills or a new law is noticed."""
    times = Times(RENEWAL_S / 4.5, 0.0, 0.0, 0.0, 0.0)
    counted = 0

    class Counting(StepLaw):
        __slots__ = ()

        def values(self, rows, num_logits):
            nonlocal counted
            counted += 1
            return super().values(rows, num_logits)

    meter = StepMeter(Counting(*LAW))

    def judge(first: int, *slots: int, count: int = 1, admitted: tuple[Admission, ...] = ()) -> list[int]:
        """The number of predictions by step, of four steps with rows in these slots."""
        before, found = counted, []
        for i in range(4):
            rows = tuple(Row(slot, first + i, count) for slot in slots)
            meter.judge(Step(0, rows, admitted if i == 0 else ()), times)
            found.append(counted - before)
            before = counted
        return found

    assert judge(10, 0, 1) == [1, 1, 0, 0]
    assert judge(14, 0, 1) == [0, 0, 1, 0]  # the fifth since the last prediction
    assert judge(18, 0, 1, 2) == [1, 1, 0, 0]
    assert judge(20, 2, count=5) == [1, 1, 1, 1]
    assert judge(10, 2) == [1, 1, 0, 0]
    another = Admission(2, "b", 0, SamplingParams(), (), 1)
    assert judge(1, 2, admitted=(another,)) == [1, 1, 0, 0]  # with the slot that the last one had


def test_without_a_law_only_other_causes_than_computing_are_named() -> None:
    machine = Machine(sleep_in_sampling)
    steps = run(machine, 100, 20, StepMeter())
    assert share_named(steps[1:], "sampling") == 1.0
    steps = run(Machine(nothing), 100, 20, StepMeter())
    assert {(step.bound, step.predicted_s, step.roof_share) for step in steps} == {("", 0.0, 0.0)}


@pytest.mark.parametrize(
    ("times", "computing", "bound"),
    [
        (Times(0.010, 0.001, 0.0, 0.002, 0.003), "memory", "memory"),
        (Times(0.010, 0.006, 0.0, 0.002, 0.003), "memory", "overhead"),
        (Times(0.010, 0.001, 0.004, 0.002, 0.003), "memory", "sampling"),
        (Times(0.010, 0.001, 0.0, 0.0, 0.006), "bf16", "waiting"),
        (Times(0.010, 0.004, 0.0, 0.006, 0.0), "overhead", "overhead"),
        (Times(0.0, 0.0, 0.0, 0.0, 0.0), "f32", "f32"),
        (Times(0.001, 0.0, 0.0, 0.002, 0.001), "f32", "sampling"),  # clocks are not exact
    ],
)
def test_the_largest_part_names_a_step(times: Times, computing: str, bound: str) -> None:
    assert bound_of(times, computing) == bound  # type: ignore[arg-type]


def test_a_record_has_the_parts_of_a_step() -> None:
    """The time of masks is neither the device's nor idle; no time is counted twice."""
    machine = Machine(lambda result: longer(result, 0.003, mask_s=0.003, sampling_s=2e-5, core_wait_s=3e-5))
    began_s = machine.now_s
    steps = run(machine, 100, 20)
    for step in steps:
        assert (step.mask_s, step.sampling_s, step.core_wait_s) == (0.003, 2e-5, 3e-5)
        assert step.idle_s == pytest.approx(machine.gap_s)
        assert step.device_s < 0.015
    assert sum(step.wall_s for step in steps) == pytest.approx(machine.now_s - began_s)


def test_the_scheduler_gets_the_law() -> None:
    laws: list[StepLaw] = []

    class Recorded(Scheduler):
        def calibrate(self, law: StepLaw, draft_law: StepLaw | None = None) -> None:
            laws.append(law)
            super().calibrate(law)

    scheduler = Recorded(
        groups=[BlockGroup(64)],
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    engine = Engine(scheduler, Machine(nothing), meter=StepMeter(LAW))
    assert laws == [LAW]  # before the first step is planned
    engine.add(NewRequest("a", (1, 2, 3), SamplingParams(max_tokens=5)))
    while engine.has_work:
        engine.step()
    assert laws == [LAW]


def test_a_table_of_steps() -> None:
    records = run(Machine(nothing), 512 * 4, 50)
    first, second = by_bound(records)
    assert (first.bound, first.num_steps, second.bound, second.num_steps) == ("int8", 4, "memory", 49)
    assert first.seconds + second.seconds == pytest.approx(sum(record.wall_s for record in records))
    head, *lines = table(records).splitlines()
    assert head.split()[:3] == ["bound", "steps", "time"]
    assert [line.split()[:2] for line in lines] == [["int8", "4"], ["memory", "49"]]
    assert table([]).splitlines() == [head]


def test_a_share_above_the_roof_says_that_ceilings_are_stale() -> None:
    """Nothing is clipped."""
    fast = run(Machine(nothing, law_times(0.5)), 512, 20)
    assert min(step.roof_share for step in fast) > 1.5
    assert "ceiling stale" in table(fast)
    assert [share_in_words(share) for share in (0.0, 0.831, 1.0, 1.04)] == [
        "-",
        "83%",
        "100%",
        "104%, ceiling stale",
    ]
