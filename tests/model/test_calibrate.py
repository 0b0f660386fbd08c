"""Calibration: laws of known factors are found again in noisy records, some of which are far off."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tiny import CONFIGS

from quire.engine.step_law import StepLaw
from quire.models import read_model
from quire.program.passes import fuse
from quire.program.program import Op
from quire.roofline.calibrate import MAX_RECORDS, Calibration
from quire.roofline.folded import fold
from quire.roofline.law import law_at_the_roof
from quire.roofline.probe import Ceilings

Rows = list[tuple[int, int]]
SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CEILINGS = Ceilings(
    "a CPU",
    "avx512",
    2,
    {"int8": 1e12, "bf16": 0.0, "f32": 2e11},
    {1: {"L2": 1e11, "memory": 2e10}, 2: {"L2": 2e11, "memory": 3e10}},
    0.0,
)


def roof_of(name: str, levels: dict[str, int] | None = None) -> StepLaw:
    program = fuse(read_model({**CONFIGS[name], **SIZES}).program)

    def arithmetic(op: Op) -> str:
        return "int8" if op.weights() and len(op.weights()[0].shape) > 1 else "f32"

    folded = fold(program, lambda spec: spec.size, kv_itemsize=2, arithmetic=arithmetic, tile_rows=8)
    return law_at_the_roof(folded, CEILINGS, levels or {})


def slowed(
    roof: StepLaw, memory: float, arithmetic: float, tile_s: float, overhead_s: list[float]
) -> StepLaw:
    """The law of a machine whose stages are slower than the roof by these factors."""
    tiles = [float(feature.kind == "tiles") for feature in roof.features]

    def slower(coefficients: tuple[float, ...], factor: float, more_s: float) -> tuple[float, ...]:
        return tuple(one * factor + tile * more_s for one, tile in zip(coefficients, tiles, strict=True))

    stages = tuple(
        one._replace(
            memory=slower(one.memory, memory, 0.0),
            arithmetic=slower(one.arithmetic, arithmetic, tile_s * (one.name == "products")),
        )
        for one in roof.roof
    )
    return roof._replace(stages=stages, overhead=(*overhead_s, *[0.0] * (len(roof.features) - 4)))


def step_of(rng: random.Random) -> tuple[Rows, int]:
    """A step of a busy server: rows that decode and, in some, a chunk of a prompt."""
    rows = [(rng.randrange(4000), 1) for _ in range(rng.choice((0, 1, 2, 4, 8, 16, 32)))]
    if not rows or rng.random() < 0.3:
        rows.append((rng.choice((0, 512, 2048)), rng.randrange(16, 512)))
    return rows, len(rows)


def relative_errors(
    law: StepLaw, truth: StepLaw, make: Callable[[random.Random], tuple[Rows, int]]
) -> np.ndarray:
    rng, errors = random.Random("test"), []
    for _ in range(200):
        found = law.values(*make(rng))
        errors.append(law.seconds(found) / truth.seconds(found) - 1)
    return np.array(errors)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("factors", [(1.1, 1.5, 2e-5), (1.6, 1.1, 0.0), (2.5, 3.0, 1e-4)], ids=str)
def test_a_law_is_found_again(name: str, factors: tuple[float, float, float]) -> None:
    roof = roof_of(name)
    truth = slowed(roof, *factors, [4e-4, 1e-5, 1e-6, 4e-6])
    rng, calibration = random.Random(name), Calibration(roof)
    for number in range(600):
        found = truth.values(*step_of(rng))
        seconds = truth.seconds(found) * rng.gauss(1, 0.02)
        calibration.add(found, seconds * rng.uniform(2, 6) if number % 10 == 0 else seconds)
    errors = relative_errors(calibration.law(), truth, step_of)
    assert np.median(np.abs(errors)) < 0.02
    assert abs(np.mean(errors)) < 0.015


def test_a_row_that_begins_a_tile_takes_longer() -> None:
    roof = roof_of("llama")
    truth = slowed(roof, 1.1, 3.0, 4e-4, [4e-4, 1e-5, 0.0, 0.0])
    rng, calibration = random.Random(0), Calibration(roof)
    for _ in range(400):
        found = truth.values([(rng.randrange(1000), 1)] * rng.randrange(1, 33), 1)
        calibration.add(found, truth.seconds(found) * rng.gauss(1, 0.01))
    law = calibration.law()

    def step_s(of: StepLaw, num_rows: int) -> float:
        return of.seconds(of.values([(500, 1)] * num_rows, 1))

    for num_rows in (15, 16, 23, 24):
        expected = step_s(truth, num_rows + 1) - step_s(truth, num_rows)
        assert step_s(law, num_rows + 1) - step_s(law, num_rows) == pytest.approx(expected, rel=0.2)
    assert step_s(truth, 17) - step_s(truth, 16) > 2 * (step_s(truth, 16) - step_s(truth, 15))


def test_without_records_a_law_is_assumed() -> None:
    law = Calibration(roof_of("llama")).law()
    rng = random.Random(0)
    for _ in range(50):
        found = law.values(*step_of(rng))
        assert 1.1 * law.roof_s(found) < law.seconds(found) < 2.5 * law.roof_s(found)
    assert law.overhead == (0.0,) * len(law.features)


def test_one_kind_of_step_is_predicted_and_the_rest_assumed() -> None:
    roof = roof_of("llama")
    truth = slowed(roof, 1.3, 1.5, 0.0, [5e-4, 0.0, 0.0, 0.0])
    calibration = Calibration(roof)
    for position in range(100):
        rows = [(500 + position, 1)] * 16
        found = truth.values(rows, 16)
        calibration.add(found, truth.seconds(found))
    law = calibration.law()
    assert law.seconds(found) == pytest.approx(truth.seconds(found), rel=0.02)
    prompt = law.values([(0, 512)], 1)
    assert 0.5 < law.seconds(prompt) / truth.seconds(prompt) < 2


def test_what_rare_steps_told_is_kept() -> None:
    roof = roof_of("llama")
    truth = slowed(roof, 1.2, 3.0, 0.0, [3e-4, 1e-5, 1e-6, 1e-6])
    calibration, rng = Calibration(roof), random.Random(0)
    for _ in range(40):
        found = truth.values([(0, rng.randrange(16, 512))], 1)
        calibration.add(found, truth.seconds(found))
    for _ in range(5000):
        found = truth.values([(rng.randrange(2000), 1)] * 2, 2)
        calibration.add(found, truth.seconds(found) * 1.05)
    law, prompt = calibration.law(), truth.values([(0, 400)], 1)
    assert law.seconds(prompt) == pytest.approx(truth.seconds(prompt), rel=0.05)


def test_records_are_bounded_for_all_kinds_of_steps() -> None:
    roof, rng = roof_of("llama"), random.Random(0)
    calibration = Calibration(roof)
    for _ in range(6000):
        rows = [
            (
                rng.choice((0, rng.randrange(1 << rng.randrange(1, 16)))),
                rng.randrange(1, 1 << rng.randrange(1, 9)),
            )
        ]
        calibration.add(roof.values(rows * rng.randrange(1, 9), 1), 1.0)
    assert calibration.num_records == MAX_RECORDS


@pytest.mark.parametrize("unit_s", [1e-9, 1e-3, 1e4])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_whatever_is_recorded_gives_a_law(unit_s: float, count: int) -> None:
    """Times that no machine has, equal ones, and ones that have nothing to do with the steps."""
    for name in ("llama", "mixtral"):
        roof, rng = roof_of(name), random.Random(count)
        calibrations = [Calibration(roof), Calibration(roof)]
        for _ in range(count):
            found = roof.values(*step_of(rng))
            calibrations[0].add(found, unit_s, unit_s)
            calibrations[1].add(found, unit_s * rng.expovariate(1), 0.0, rng.choice((0.0, 0.9 * unit_s)))
        for calibration in calibrations:
            law = calibration.law()
            numbers = [law.seconds(law.values(*step_of(rng))), law.host_s, law.tail]
            assert all(0 <= one < 1e9 for one in numbers)


def test_disturbed_steps_count_without_their_wait() -> None:
    roof, rng = roof_of("llama"), random.Random(0)
    truth = slowed(roof, 1.3, 1.6, 0.0, [5e-4, 0.0, 0.0, 0.0])
    calibration = Calibration(roof)
    for number in range(400):
        found = truth.values(*step_of(rng))
        seconds = truth.seconds(found)
        waited_s = 0.002 + 0.002 * (number % 3)
        calibration.add(found, seconds + waited_s, 0.0, waited_s)
        calibration.add(found, waited_s, 0.0, waited_s)  # no time is left: nothing is learned
    errors = relative_errors(calibration.law(), truth, step_of)
    assert np.abs(errors).max() < 0.03


def test_the_time_between_steps_and_the_tail_are_those_of_the_latest() -> None:
    roof = roof_of("llama")
    truth = slowed(roof, 1.2, 1.5, 0.0, [5e-4, 0.0, 0.0, 0.0])
    calibration, found = Calibration(roof), roof.values([(100, 1)] * 4, 4)
    for number in range(1000):
        slow = 3.0 if number % 50 == 0 else 1.0  # 2% of the steps take three times as long
        calibration.add(found, truth.seconds(found) * slow, 10.0 if number < 400 else 2e-4)
    law = calibration.law()
    assert law.host_s == pytest.approx(2e-4)
    assert law.tail == pytest.approx(
        (3 * truth.seconds(found) + 2e-4) / (truth.seconds(found) + 2e-4), rel=0.03
    )


def test_the_tail_is_that_of_long_steps() -> None:
    """A delay of a tenth of a long step, now and then, makes short steps much longer than predicted."""
    roof = roof_of("llama")
    truth = slowed(roof, 1.2, 1.5, 0.0, [5e-4, 0.0, 0.0, 0.0])
    calibration = Calibration(roof)
    short, long = (roof.values([(100, 1)] * 4 + prompt, 4) for prompt in ([], [(0, 500)]))
    for number in range(1000):
        found = short if number % 5 else long
        calibration.add(found, truth.seconds(found) + truth.seconds(long) / 10 * (number % 20 < 2))
    law = calibration.law()
    assert truth.seconds(long) > 5 * truth.seconds(short)
    assert law.tail == pytest.approx(1.1, rel=0.03)


def test_the_roof_of_weights_in_a_cache() -> None:
    """All weights fit into twice the bytes a thread read at a level, or they come from memory."""
    weight_bytes = sum(
        spec.size for spec in read_model({**CONFIGS["llama"], **SIZES}).program.weights().values()
    )
    small, large = (
        roof_of("llama", {"L2": weight_bytes // 3}),
        roof_of("llama", {"L2": weight_bytes // 2 + 1}),
    )
    found = small.values([(0, 1)], 1)
    assert {stage.place for stage in small.roof} == {"memory"}
    assert {stage.place for stage in large.roof} == {"cache"}
    assert large.limits(found).keys() <= {"cache", "int8", "f32", "overhead"}
    assert small.roof_s(found) / large.roof_s(found) == pytest.approx(2e11 / 3e10, rel=0.01)


def test_the_roof_is_bytes_over_bandwidth_or_operations_over_peak() -> None:
    roof = roof_of("llama")
    program = fuse(read_model({**CONFIGS["llama"], **SIZES}).program)
    costs = fold(program, lambda spec: spec.size, kv_itemsize=2)
    alone = costs.cost([(0, 1)], 1)
    read = (alone.weight_bytes + alone.kv_read_bytes + alone.kv_write_bytes) / 3e10
    assert roof.roof_s(roof.values([(0, 1)], 1)) == pytest.approx(read, rel=0.01)
    prompt = [(0, 4096)]
    found = roof.values(prompt, 0)
    by_name = {stage.name: stage for stage in roof.roof}
    assert by_name["products"].kind == "int8"
    assert by_name["attention"].kind == "f32"
    products = 2 * 4096 * (SIZES["num_hidden_layers"] * 512 * (512 * 2 + 2 * 128 + 3 * 1024)) / 1e12
    attention = 2 * SIZES["num_hidden_layers"] * 2 * 512 * (4096 * 4097 / 2) / 2e11
    limits = roof.limits(found)
    assert limits["int8"] == pytest.approx(products, rel=0.01)
    assert limits["f32"] == pytest.approx(attention, rel=0.01)
