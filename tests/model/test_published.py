"""Ranges of plans against published measurements: the half of the rows that no constant was fitted on."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_rows import cpus, h100, vllm_runs

from quire.roofline.machines import find
from quire.roofline.shares import SPREAD, TYPICAL, Span, TypicalShares, typical_law

HELD = 0.9


@pytest.fixture(scope="module")
def rows(shared_data: Path) -> list[h100.H100Row]:
    return h100.read_rows(shared_data)


def share_held(spans: list[tuple[Span, float]]) -> float:
    assert all(span.high <= SPREAD * span.low * (1 + 1e-9) for span, _ in spans)
    return sum(span.holds(value) for span, value in spans) / len(spans)


def test_no_row_is_left_out(rows: list[h100.H100Row], shared_data: Path) -> None:
    assert len(rows) == 843
    assert len(cpus.read_rows(shared_data)) == 214
    assert 400 < sum(row.fitted for row in rows) < 443


@pytest.mark.parametrize("fitted", [False, True])
def test_times_of_tokens_and_requests_on_an_h100(rows: list[h100.H100Row], fitted: bool) -> None:
    own = [row for row in rows if row.fitted is fitted]
    shares = TYPICAL["gpu"]
    assert share_held([(row.tpot(shares), row.tpot_s) for row in own]) >= HELD
    assert share_held([(row.e2e(shares), row.e2e_s) for row in own]) >= HELD


@pytest.mark.parametrize("fitted", [False, True])
def test_times_of_tokens_on_three_cpus(shared_data: Path, fitted: bool) -> None:
    own = [row for row in cpus.read_rows(shared_data) if row.fitted is fitted]
    assert share_held([(row.span(cpus.CALIBRATED), row.token_s) for row in own]) >= HELD


@pytest.mark.parametrize("run", vllm_runs.RUNS, ids=lambda run: run.folder)
def test_two_runs_of_vllm(shared_data: Path, run: vllm_runs.VllmRun) -> None:
    for what, span, value in vllm_runs.compare(shared_data, run):
        assert span.holds(value), what
        assert span.high <= SPREAD * span.low * (1 + 1e-9)


def test_rows_are_predicted_by_the_law_of_plans(rows: list[h100.H100Row]) -> None:
    """The rows keep the terms of the law, to fit constants quickly."""
    shares = TYPICAL["gpu"]
    for row in rows[::200]:
        law = typical_law(row.model.folded, find(h100.MACHINE), row.cards, layers=row.model.layers)
        context = row.prompt + row.output // 2
        step = law.seconds(law.values(((context - 1, 1),) * row.batch, row.batch))
        prompt = law.seconds(law.values(((0, row.prompt),), 1))
        others = (row.batch - 1) / (row.output - 1) if row.shared else 0
        assert row.tpot(shares).typical == pytest.approx(step + others * prompt)


def test_a_roof_alone_holds_few_rows(rows: list[h100.H100Row]) -> None:
    """Without typical shares and overheads the ranges hold far fewer."""
    alone = TypicalShares(1.0, 1.0)
    assert share_held([(row.tpot(alone), row.tpot_s) for row in rows]) < 0.3
