"""Progress bars: nothing where they would disturb, little work where they are shown."""

from __future__ import annotations

import io
import sys

import pytest

from quire.llm import LLM
from quire.outputs import CompletionOutput, RequestOutput
from quire.progress import TokenCount, generation_bar, loading_bar
from quire.sampling_params import SamplingParams


def test_bars_show_nothing_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar("m") as advance:
        advance(1, 1 << 40)
    LLM("demo").generate("Hi", SamplingParams(max_tokens=2), use_tqdm=True)
    assert capsys.readouterr().err == ""


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with loading_bar("[a model]") as advance:
        advance(1, 1000)
        assert shown.getvalue() == ""
        advance(1_000_000, 1 << 40)
    assert "loading [a model]" in shown.getvalue()
    with generation_bar(1, enabled=True) as step:
        step(RequestOutput("0", None, [], [CompletionOutput(0, token_ids=[1])], finished=True))
    assert "tok/s" in shown.getvalue()


def test_totals_are_kept() -> None:
    count, one, two = TokenCount(), CompletionOutput(0), CompletionOutput(0)
    first, second = (RequestOutput(name, None, [], [choice]) for name, choice in (("0", one), ("1", two)))
    for choice, output in ((one, first), (two, second), (one, first)):
        choice.token_ids += [1, 2]
        output.finished = len(choice.token_ids) == 4
        count.take(output)
    assert (count.tokens, count.finished) == (6, 1)
