"""Reports and charts of load tests: what they show of runs that are written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quire.bench import charts, report, trial_report
from quire.bench.definitions import MEASURES, OTHERS, glossary
from quire.bench.driver import LoadRun
from quire.bench.metrics import Timeline, summarize
from quire.bench.search import Search, Trial
from quire.bench.trials import Outcome
from quire.goals import Goal
from quire.plots import svg

GOAL = Goal.parse("ttft_p90<500ms,itl_p99<60ms")


def made(ttft_ms: float, errors: int = 0) -> LoadRun:
    """Ten requests, one a second, of three tokens 50 ms apart; and some that failed."""
    run = LoadRun(0.0, 10.0, 0.001)
    for index in range(10):
        chunks = [index + ttft_ms / 1e3 + 0.05 * number for number in range(3)]
        run.timelines.append(Timeline(index, index - 0.002, chunks, chunks[-1], 7, 3))
    run.timelines += [Timeline(0.0, end_s=0.01, error="HTTP 503 full", is_rejected=True)] * errors
    return run


def trial(rate: float, ttft_ms: float, growth: float = 0.0) -> Trial:
    run = made(ttft_ms)
    return Trial(rate, run, summarize(run.timelines, 10.0, GOAL), GOAL, growth)


TRIALS = [trial(1.0, 100.0), trial(2.0, 200.0), trial(2.0, 300.0), trial(4.0, 900.0, 0.5)]


def test_a_report_has_every_figure() -> None:
    text = report.text(made(100.0, errors=2), GOAL)
    assert "10 requests in 10.0 s, at most 3 at once; 2 failed" in text
    assert "1.00 requests/s, 3.0 output tokens/s, 10.0 tokens/s with prompts" in text
    assert "goodput 1.00 requests/s (ttft_p90<500ms,itl_p99<60ms: 83.3% kept it)" in text
    assert "the run as a whole keeps the goal" in text
    assert "the run as a whole breaks ttft_p90<500ms\n" in report.text(made(600.0), GOAL)
    assert "failed: 2 times HTTP 503 full" in text
    rows = {line.split()[0]: line.split()[-6:] for line in text.splitlines() if "  " in line}
    assert rows["TTFT"] == ["100", "100", "100", "100", "100", "100"]
    assert rows["ITL"] == ["50.0"] * 6
    assert "sent too late by" in text
    assert "time to refusal" in text


def test_a_line_of_a_trial_stands_under_its_heading() -> None:
    heading = trial_report.trial_heading(GOAL).splitlines()[0]
    line = trial_report.trial_line(TRIALS[1])
    assert line.endswith("  keeps the goal")
    for name, value in (("rate", "2.00"), ("ttft_p90", "200"), ("itl_p99", "50.0")):
        assert line[: heading.index(name) + len(name)].endswith(value)
    assert trial_report.trial_line(TRIALS[3]).endswith("saturated: TTFT grows by 0.50 s each second")


def test_the_outcome_names_each_search_and_the_spread() -> None:
    searches = [Search(low=4.0, high=4.2, trials=TRIALS), Search(low=5.0, high=math.inf)]
    text = trial_report.outcome_text(Outcome(searches), GOAL)
    assert "highest rate that keeps ttft_p90<500ms,itl_p99<60ms: 4.00 requests/s" in text
    assert "search 1: 4.00 requests/s, not at 4.20 (4 trials)" in text
    assert "search 2: 5.00 requests/s, no rate was too high" in text
    assert "spread: 25.0%, from 4.00 to 5.00" in text


def test_figures_of_trials_are_json() -> None:
    outcome = Outcome([Search(low=2.0, high=4.0, trials=TRIALS)])
    found = json.loads(json.dumps(trial_report.trials_json(TRIALS, GOAL, {"seed": 1}, outcome, True)))
    assert found["goal"] == str(GOAL)
    assert (found["highest_request_rate"], found["spread"]) == (2.0, 0.0)
    first, *_, last = found["trials"]
    assert first["p90_ttft_ms"] == pytest.approx(100.0)
    assert (first["problem"], last["problem"][:9]) == ("", "saturated")
    assert len(first["requests"][0]["chunk_s"]) == 3


def test_figures_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    outcome = Outcome([Search(low=2.0, high=math.inf)])
    report.write_json(path, trial_report.trials_json([], GOAL, {"request_rate": math.inf}, outcome, False))
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["options"] == {"request_rate": None}
    assert found["searches"] == [{"keeps": 2.0, "breaks": None}]


def test_the_chart_over_rate_leaves_saturated_trials_out() -> None:
    chart = charts.rate_chart(TRIALS, GOAL, highest=2.0)
    ttft, itl = chart.series
    assert ttft.points == [(1.0, pytest.approx(100.0)), (2.0, pytest.approx(250.0))]
    assert ttft.band == [pytest.approx((100.0, 100.0)), pytest.approx((200.0, 300.0))]
    assert [y for _, y in itl.points] == pytest.approx([50.0, 50.0])
    labels = [rule.label for rule in chart.rules]
    assert labels == ["ttft_p90<500ms", "itl_p99<60ms", "highest rate 2", "saturated at 4"]
    assert "highest rate 2" in svg(chart)


def test_the_chart_by_percentile_has_a_line_for_each_measure() -> None:
    chart = charts.percentile_chart(made(100.0, errors=1), GOAL)
    assert [one.label for one in chart.series] == [one.name for one in MEASURES.values()]
    assert all(len(one.points) > 90 for one in chart.series)
    assert svg(charts.percentile_chart(LoadRun(0.0), Goal()))


def test_definitions_are_told_once_each() -> None:
    text = " ".join(glossary().split())
    for one in (*MEASURES.values(), *OTHERS.values()):
        assert text.count(one.meaning) == 1
