"""The meter of a live engine: it fits the law of steps to their records, and gives it to the scheduler."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.backends.device import device_for
from quire.backends.native.device import NativeLoops
from quire.config import EngineConfig
from quire.engine.meter import Times
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.roofline import probe
from quire.roofline.calibrate import Calibration
from quire.roofline.meter import FIRST_FIT, FIT_S, MAX_FIT, StepMeter
from quire.runner.runner import Runner
from quire.sampling_params import StructuredOutputsParams
from quire.types import Row, Step

FEATURES = (*LEADING, Feature("positions"), Feature("pairs"))
PRODUCTS = Stage((2e-3, 0, 0, 0, 0, 0), (0, 0, 1e-4, 0, 0, 0), "products", "memory", "int8")
ATTENTION = Stage((0, 0, 0, 0, 1e-6, 0), (0, 0, 0, 0, 0, 1e-8), "attention", "memory", "bf16")
ROOF = StepLaw(FEATURES, (PRODUCTS, ATTENTION), (0.0,) * 6, (PRODUCTS, ATTENTION))
IDLE_S = 2e-4


def seconds(rows: list[Row]) -> float:
    """The time that steps take on this machine: memory 1.5 and arithmetic 2 times that at the roof."""
    tokens = sum(row.count for row in rows)
    positions = sum(row.start + row.count for row in rows)
    return 1e-3 + max(1.5 * 2e-3, 2 * 1e-4 * tokens) + 2 * 1e-6 * positions


def steps(noise: random.Random, count: int) -> list[list[Row]]:
    """Steps of some streams, now and then with a chunk of a prompt."""
    found = []
    for index in range(count):
        streams = 1 + index // 40 % 8
        rows = [Row(slot, 100 * slot + index % 40, 1) for slot in range(streams)]
        if noise.random() < 0.2:
            rows.append(Row(streams, noise.randint(0, 300), noise.randint(2, 200)))
        found.append(rows)
    return found


def test_predictions_become_those_of_the_machine() -> None:
    noise = random.Random(1)
    calibration = Calibration(ROOF)
    meter = StepMeter(calibration.law(), calibration)
    laws, errors, since_s = [calibration.law()], [], []
    assert meter.new_law() == laws[0]
    time_s = 0.0
    for index, rows in enumerate(steps(noise, 6000)):
        disturbed_s = 0.02 if noise.random() < 0.4 else 0.0  # a core that another program takes
        device_s = seconds(rows) * noise.uniform(0.97, 1.03) + disturbed_s
        time_s += device_s + IDLE_S
        verdict = meter.judge(Step(index, tuple(rows)), Times(device_s, IDLE_S, 0.0, 0.0, disturbed_s))
        errors.append(abs(verdict.predicted_s / seconds(rows) - 1))
        found = laws[-1].values([(row.start, row.count) for row in rows], len(rows))
        assert verdict.predicted_s == pytest.approx(laws[-1].seconds(found), rel=1e-6)
        assert verdict.roof_share < 1
        if (law := meter.new_law()) is not None:
            laws.append(law)
            since_s.append(time_s)
    assert sorted(errors[-1000:])[950] < 0.05
    assert sorted(errors[:FIRST_FIT])[32] > 0.1  # before the first fit
    assert laws[-1].host_s == pytest.approx(IDLE_S)
    assert 1 <= laws[-1].tail < 20
    assert all(after - before >= 0.95 * FIT_S for before, after in itertools.pairwise(since_s))
    assert 3 <= len(since_s) <= time_s / FIT_S + 1


@pytest.mark.parametrize("device", ["native", "reference"])
def test_backends_tell_where_the_time_of_steps_goes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that take 10 ms, with sampling and computing in the rest of the time."""
    begin = Runner._begin_masks

    def slow_masks(*arguments: Any) -> Any:
        collect = begin(*arguments)

        def slowly() -> Any:
            time.sleep(0.01)
            return collect()

        return slowly

    monkeypatch.setattr(Runner, "_begin_masks", slow_masks)
    params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[a-z]{9}"))
    with LLM("demo", device=device, num_threads=1) as llm:
        llm.generate("Once", params, use_tqdm=False)
        records = list(llm.engine.records)
    assert records
    for record in records:
        assert record.mask_s >= 0.01
        assert 0 < record.sampling_s < record.device_s
        assert 0 <= record.core_wait_s < record.device_s + 1e-4


def test_fits_wait_for_ever_more_records() -> None:
    calibration = Calibration(ROOF)
    meter = StepMeter(calibration.law(), calibration)
    fits = []
    for index in range(3000):
        row = Row(index % 2, 10, 7)  # other rows than the last: a record each
        meter.judge(Step(index, (row,)), Times(2 * FIT_S, 0.0, 0.0, 0.0, 0.0))
        if meter.new_law() is not None:
            fits.append(index)
    assert fits[0] == 0  # the law it began with
    gaps = [after - before for before, after in itertools.pairwise(fits[1:])]
    assert fits[1] == FIRST_FIT - 1
    assert gaps == [min(FIRST_FIT << number, MAX_FIT) for number in range(1, len(gaps) + 1)]


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_judges_by_the_ceilings_that_are_known(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures none itself."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(NativeLoops, "operations", lambda *_: 1e15)
    monkeypatch.setattr(NativeLoops, "read_bytes", lambda *_: 1e13)
    if known:
        probe.ceilings(device_for(EngineConfig(device="native", num_threads=1)).loops())
    with LLM("demo", device="native", num_threads=1, speculative="off") as llm:
        llm.generate("Once", SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        records = list(llm.engine.records)
    assert len(records) == 20
    for record in records:
        assert (record.predicted_s > 0) == (record.roof_share > 0) == known
        assert record.bound != "" or not known
