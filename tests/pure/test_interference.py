"""Steps of rows of one token, accounted for at once, against the same steps accounted for row by row."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from quire.engine.interference import Interference
from quire.engine.receipts import Receipt
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Row, Step

BUCKET, WINDOW = 16, 96  # positions: how far apart starts are that are predicted alike, and those seen
FULL, PARTIAL = Feature("positions"), Feature("positions", WINDOW)


def law_of(rng: random.Random, *positions: Feature) -> StepLaw:
    """Weights, a time by token, attention by position, and overhead; at the roof half of that."""
    none = (0.0,) * len(positions)
    cached = tuple(rng.uniform(1e-5, 1e-3) for _ in positions)
    stages = (
        Stage((rng.uniform(0.1, 0.5), 0.0, 0.0, 0.0, *none), (0.0, 0.0, rng.uniform(0.0, 0.1), 0.0, *none)),
        Stage((0.0, 0.0, 0.0, 0.0, *cached), (0.0,) * 4 + none),
    )
    overhead = (rng.uniform(0.0, 0.2), rng.uniform(0.0, 0.05), 0.0, rng.uniform(0.0, 0.01), *none)
    roof = tuple(
        Stage(tuple(x / 2 for x in one.memory), tuple(x / 2 for x in one.arithmetic)) for one in stages
    )
    return StepLaw((*LEADING, *positions), stages, overhead, roof, host_s=rng.choice([0.0, 0.1]))


def running(name: str, slot: int, admitted_s: float) -> Sequence:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    (sequence,) = ScheduledRequest.of(NewRequest(name, (1,), params), 100, 4, private=False).sequences
    sequence.slot, sequence.receipt.admitted_s = slot, admitted_s
    return sequence


def receipts(law: StepLaw, steps: list[tuple[float, list[int]]], row_by_row: bool) -> list[Receipt]:
    """The receipts of sequences that decode in steps of these ends and starts of rows.

    What makes the difference is one that runs without a row, which adds nothing to the time of the others.
    """
    interference = Interference(chunk=16)
    interference.calibrate(law)
    sequences = [running(str(slot), slot, 0.1 * slot) for slot in range(len(steps[0][1]))]
    waiting = [running("without a row", len(sequences), 0.0)] * row_by_row
    for index, (end_s, starts) in enumerate(steps):
        rows = tuple(Row(slot, start, 1) for slot, start in enumerate(starts))
        interference.count(Step(index, rows), sequences, [*sequences, *waiting], 0.0, end_s)
    return [sequence.receipt for sequence in sequences]


def steps_from(rng: random.Random, starts: list[int], stride: int) -> list[tuple[float, list[int]]]:
    """Some steps, of which each begins `stride` positions after the one before."""
    ends_s = sorted(rng.uniform(1.0, 9.0) for _ in range(4))
    return [(end_s, [start + step * stride for start in starts]) for step, end_s in enumerate(ends_s)]


def predicted_s(law: StepLaw, starts: list[int]) -> float:
    return law.seconds(law.values([(start, 1) for start in starts], len(starts))) + law.host_s


def furthest_s(law: StepLaw, steps: list[tuple[float, list[int]]]) -> float:
    """How far apart the sums of interference may be if each position counted is at most half a bucket off."""
    position_s = sum(law.stages[1].memory)
    ends_s = [0.0, *[end_s for end_s, _ in steps]]
    lasted_s = [end_s - begin_s for begin_s, end_s in pairwise(ends_s)]
    shares = [len(starts) * BUCKET / 2 * position_s / predicted_s(law, starts) for _, starts in steps]
    return 1.1 * sum(map(float.__mul__, lasted_s, shares))  # its own prediction is off, too


@pytest.mark.parametrize("positions", [(FULL,), (PARTIAL,), (FULL, PARTIAL)])
@pytest.mark.parametrize("seed", range(20))
def test_rows_in_the_middle_of_one_bucket_are_predicted_exactly(seed, positions):
    rng = random.Random(seed)
    law, middle = law_of(rng, *positions), BUCKET * rng.randrange(12) + BUCKET // 2
    steps = steps_from(rng, [middle] * rng.randrange(1, 9), BUCKET)
    together, apart = (receipts(law, steps, row_by_row) for row_by_row in (False, True))
    for one, other in zip(together, apart, strict=True):
        assert one.decode_interference_s == pytest.approx(other.decode_interference_s)
        assert replace(one, decode_interference_s=0.0) == replace(other, decode_interference_s=0.0)
        assert one.ideal_s > 0
        assert (one.decode_interference_s > 0) == (len(together) > 1)


@pytest.mark.parametrize(
    ("positions", "lowest", "highest"),
    [
        ((FULL,), 0, 4000),
        ((PARTIAL,), 0, WINDOW - 2 * BUCKET),
        ((FULL, PARTIAL), WINDOW + BUCKET, 4000),
    ],
)
@pytest.mark.parametrize("seed", range(20))
def test_rows_anywhere_are_predicted_but_for_half_a_bucket_each(seed, positions, lowest, highest):
    """Without a window, or with all rows on one side of it."""
    rng = random.Random(seed)
    law = law_of(rng, *positions)
    steps = steps_from(rng, [rng.randint(lowest, highest) for _ in range(rng.randrange(2, 9))], 1)
    together, apart = (receipts(law, steps, row_by_row) for row_by_row in (False, True))
    for one, other in zip(together, apart, strict=True):
        assert abs(one.decode_interference_s - other.decode_interference_s) <= furthest_s(law, steps)
        assert replace(one, decode_interference_s=0.0) == replace(other, decode_interference_s=0.0)
