"""What is said of drafts: in the terminal, after a batch and a load test, in `timings`, in a trace."""

from __future__ import annotations

import msgspec
import pytest

from quire.bench import report
from quire.bench.driver import LoadRun
from quire.bench.metrics import Timeline
from quire.bench.openai_api import _count
from quire.cli.batch_run import _ANSWER, Tally
from quire.cli.terminal_chat import _report, _summary
from quire.goals import Goal
from quire.outputs import CompletionOutput, RequestOutput, drafts_in_words
from quire.recording.run_trace import _receipt
from quire.server.timings import Deliveries, receipt_ms, server_timing
from quire.types import RequestMetrics

DRAFTED = {"num_drafted": 60, "num_accepted": 41, "drafting_saved_s": 1.5}
WORDS = "drafts: 41 of 60 accepted, 1.75 times as fast"


def answer(**drafts: float) -> RequestOutput:
    """An answer of 65 tokens, of which the first came after 1 s, and the others in 2 s."""
    times = RequestMetrics(10.0, 10.0, 11.0, 13.0, **drafts)  # type: ignore[arg-type]
    choice = CompletionOutput(0, "x", [1] * 65, finish_reason="stop", metrics=times)
    return RequestOutput("1", None, [1, 2], [choice], finished=True, metrics=times)


def test_words() -> None:
    assert drafts_in_words(41, 60, 2.0, 1.5) == WORDS
    assert drafts_in_words(1_000, 2_000, 2.0, -0.5) == "drafts: 1,000 of 2,000 accepted, 0.75 times as fast"
    assert drafts_in_words(0, 3, 2.0, 0.0) == "drafts: 0 of 3 accepted", "no law is known"
    assert drafts_in_words(1, 3, 0.0, 0.1) == "drafts: 1 of 3 accepted"


def test_the_gain_of_a_request() -> None:
    times = answer(**DRAFTED).metrics
    assert times is not None
    assert times.drafting_gain == 1.75
    assert RequestMetrics(1.0, drafting_saved_s=1.0).drafting_gain == 1.0


def test_the_last_line_of_a_chat() -> None:
    assert WORDS in _summary(answer(**DRAFTED)).split(" · ")
    assert "drafts" not in _summary(answer())


def test_json_of_the_terminal() -> None:
    found = _report(answer(**DRAFTED), None, False)
    assert (found["drafted_tokens"], found["accepted_tokens"], found["drafting_gain"]) == (60, 41, 1.75)
    assert "drafted_tokens" not in _report(answer(), None, False)


def test_a_batch_adds_up() -> None:
    tally = Tally(2)
    for accepted, saved_ms in ((20, 1000.0), (21, 500.0)):
        timings = {"decode_ms": 1000.0, "drafted_tokens": 30, "accepted_tokens": accepted}
        body = {"usage": {"completion_tokens": 7}, "timings": timings | {"drafting_saved_ms": saved_ms}}
        tally.answer(_ANSWER.decode(msgspec.json.encode(body)))
    assert (tally.answered, tally.tokens) == (2, 14)
    assert tally.summary().endswith(f" · {WORDS}")
    assert "drafts" not in Tally(2).summary()


def test_a_load_test_adds_up() -> None:
    run = LoadRun(0.0, 10.0, 0.001)
    for accepted, saved_ms in ((20, 1000.0), (21, 500.0)):
        run.timelines.append(Timeline(0.0, None, [1.0, 2.0], 2.0))
        timings = {"decode_ms": 1000.0, "drafted_tokens": 30, "accepted_tokens": accepted}
        _count(run.timelines[-1], {"timings": timings | {"drafting_saved_ms": saved_ms}})
    assert WORDS in report.text(run, Goal()).splitlines()
    found = report.as_json(run, Goal(), {})
    assert (found["total_drafted_tokens"], found["total_accepted_tokens"]) == (60, 41)


def test_a_load_test_of_another_server() -> None:
    run = LoadRun(0.0, 10.0, 0.001)
    run.timelines.append(Timeline(0.0, None, [1.0, 2.0], 2.0))
    _count(run.timelines[-1], {"timings": {"predicted_ms": 5.0}, "usage": None})
    assert "drafts" not in report.text(run, Goal())


def test_timings() -> None:
    deliveries = Deliveries(2, 11.0, 13.0)
    timings = receipt_ms([(answer(**DRAFTED), deliveries)], 10.0, 13.0)
    assert timings["drafting_saved_ms"] == 1500.0
    assert "drafting_saved;dur=1500" in server_timing(timings, complete=True)
    assert "drafting_saved" not in server_timing(timings, complete=False)
    assert "drafting_saved" not in server_timing(
        receipt_ms([(answer(), deliveries)], 10.0, 13.0), complete=True
    )


@pytest.mark.parametrize(("drafts", "expected"), [(DRAFTED, (60, 41, 1500.0)), ({}, (0, 0, 0.0))])
def test_a_trace(drafts: dict[str, float], expected: tuple[float, ...]) -> None:
    notes = _receipt(answer(**drafts).metrics)
    names = ("drafted_tokens", "accepted_tokens", "drafting_saved_ms")
    assert tuple(notes[name] for name in names) == expected
