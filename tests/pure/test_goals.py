"""Goals of latency: how they are written, and what keeps them."""

import pytest

from quire.errors import ConfigError
from quire.goals import EXAMPLE, Goal, Limit, duration_ms, figure_name


def test_a_goal_names_measures_statistics_and_limits() -> None:
    goal = Goal.parse(" ttft_p90 < 500ms, itl<=60ms ,e2e_mean<1.5s,tpot_p50<.5s")
    assert goal.limits == (
        Limit("ttft", "p90", 500),
        Limit("itl", "p99", 60),
        Limit("e2e", "mean", 1500),
        Limit("tpot", "p50", 500),
    )
    assert str(goal) == "ttft_p90<500ms,itl_p99<60ms,e2e_mean<1.5s,tpot_p50<500ms"
    assert Goal.parse(str(goal)) == goal
    assert str(Goal.parse(EXAMPLE)) == EXAMPLE


def test_a_limit_is_written_as_it_is() -> None:
    for text in ("ttft_p90<1234.5ms", "ttft_p90<2s", "ttft_p90<0.25ms", "ttft_p90<1001ms"):
        assert str(Goal.parse(text)) == text


def test_the_spelling_of_vllm_is_understood() -> None:
    assert Goal.parse_pairs(["ttft:500", "e2el:2000"]).limits == (
        Limit("ttft", "p99", 500),
        Limit("e2e", "p99", 2000),
    )
    assert not Goal.parse_pairs([])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft<500",
        "ttft>500ms",
        "ttft_p80<1s",
        "latency<1s",
        "ttft<0ms",
        "ttft<1s,",
        "ttft<-1s",
        "ttft<1e3ms",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Goal.parse(text)
    assert caught.value.hint
    assert "ms" in caught.value.hint


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:0", "ttft:1s", "ttfb:5", "ttft:nan", "itl:-1"])
def test_other_pairs_are_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="is not a goal of a request"):
        Goal.parse_pairs([pair])


def test_durations_have_a_unit() -> None:
    assert (duration_ms("60ms"), duration_ms("1.5s"), duration_ms(" 2 s ")) == (60, 1500, 2000)
    assert (duration_ms("30m"), duration_ms("1.5h")) == (1_800_000, 5_400_000)
    for text in ("60", "0s", "1d", "ms", "1_0ms"):
        with pytest.raises(ConfigError, match="is not a duration"):
            duration_ms(text)


def test_figures_have_the_names_of_the_report() -> None:
    assert figure_name("ttft", "p90") == "p90_ttft_ms"
    assert figure_name("itl", "p50") == "median_itl_ms"
    assert figure_name("e2e", "mean") == "mean_e2el_ms"


def test_a_goal_is_met_when_every_limit_is_kept() -> None:
    goal = Goal.parse("ttft_p90<500ms,itl_p99<60ms")
    assert goal.met({"p90_ttft_ms": 500.0, "p99_itl_ms": 60.0, "mean_ttft_ms": 9e9})
    assert not goal.met({"p90_ttft_ms": 500.1, "p99_itl_ms": 1.0})
    assert goal.broken({"p90_ttft_ms": 1.0, "p99_itl_ms": 61.0}) == goal.limits[1:]
    assert Goal().met({})


def test_without_an_answer_no_goal_is_met_and_one_token_has_no_gap() -> None:
    figures = {"p99_ttft_ms": None, "p99_itl_ms": None, "p99_tpot_ms": None, "p99_e2el_ms": None}
    assert Goal.parse("itl<1ms,tpot<1ms").met(figures)
    assert not Goal.parse("ttft<1s").met(figures)
    assert not Goal.parse("e2e<1s").met(figures)
    with pytest.raises(KeyError):
        Goal.parse("ttft_mean<1s").met(figures)
