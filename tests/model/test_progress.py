"""Progress bars: nothing where they would disturb, little work where they are shown."""

from __future__ import annotations

import io
import sys

import pytest

from quire import progress
from quire.build import build
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.llm import LLM
from quire.memory import summary
from quire.outputs import CompletionOutput, RequestOutput
from quire.progress import TokenCount, generation_bar, loading_bar
from quire.sampling_params import SamplingParams


def test_bars_show_nothing_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar("m") as advance:
        advance(1, 1 << 40)
    LLM("demo").generate("Hi", SamplingParams(max_tokens=2), use_tqdm=True)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from here on."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    return shown


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = in_terminal(monkeypatch)
    with loading_bar("[a model]") as advance:
        advance(1, 1000)
        assert shown.getvalue() == ""
        advance(1_000_000, 1 << 40)
    assert "loading [a model]" in shown.getvalue()
    with generation_bar(1, enabled=True) as step:
        step(RequestOutput("0", None, [], [CompletionOutput(0, token_ids=[1])], finished=True))
    assert "tok/s" in shown.getvalue()


def test_the_memory_plan_is_said_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and not of a model that is there at once."""
    shown = in_terminal(monkeypatch)
    LLM("demo").close()
    assert shown.getvalue() == ""
    monkeypatch.setattr(progress, "LONG_BYTES", 1_000_000)
    before: list[str] = []
    llm = LLM("demo", progress=lambda done, total: before.append(shown.getvalue()))
    llm.close()
    line = summary(describe(llm.config).memory)
    plan, _, available = line.partition(", of ")
    assert len(before) > 1
    assert before[0].startswith(plan)
    assert available.endswith(" available")
    assert set(before) == {shown.getvalue()}
    assert shown.getvalue().count("\n") == 1


def test_the_memory_plan_is_not_said_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LONG_BYTES", 1)
    LLM("demo").close()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_the_plan_is_announced_once_and_not_of_what_does_not_fit() -> None:
    said: list[tuple[str, int]] = []
    built = build(EngineConfig(), announce=lambda *what: said.append(what))
    plan = built.description.memory
    assert said == [(summary(plan), plan.working_bytes)]
    with pytest.raises(ConfigError):
        build(EngineConfig(kv_cache_memory_bytes=1), announce=lambda *what: said.append(what))
    assert len(said) == 1


def test_totals_are_kept() -> None:
    count, one, two = TokenCount(), CompletionOutput(0), CompletionOutput(0)
    first, second = (RequestOutput(name, None, [], [choice]) for name, choice in (("0", one), ("1", two)))
    for choice, output in ((one, first), (two, second), (one, first)):
        choice.token_ids += [1, 2]
        output.finished = len(choice.token_ids) == 4
        count.take(output)
    assert (count.tokens, count.finished) == (6, 1)
