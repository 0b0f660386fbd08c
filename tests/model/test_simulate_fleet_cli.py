"""`quire simulate` with several replicas: routers side by side, scaling, deaths, and what it refuses."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.simulation.law_file import KnownLaw, write_law

FEATURES = (*LEADING, Feature("positions"))
STAGE = Stage((0.010, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 1e-3, 0.0, 0.0), "products")
LAW = StepLaw(FEATURES, (STAGE,), (0.001, 0.0005, 0.0, 0.0, 0.0), (STAGE,), host_s=0.0002)
LENGTHS = ("--random-input-len", "40", "--random-output-len", "8", "--random-range-ratio", "0.5")
PREFIXES = ("--random-prefix-len", "96", "--num-prefixes", "8")


@pytest.fixture
def figures(tmp_path):
    """Run the command and return its figures."""

    def run(*flags: str, status: int = 0) -> dict:
        write_law(tmp_path / "law.json", KnownLaw(LAW, source="made up"))
        out = tmp_path / "run.json"
        given = ("demo", "--law", str(tmp_path / "law.json"), *LENGTHS, *flags, "--json", str(out))
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *given])
        assert int(ended.value.code or 0) == status
        return json.loads(out.read_text()) if not status else {}

    return run


def test_routers_are_compared(figures, tmp_path, capsys):
    flags = ("--request-rate", "30", "--num-prompts", "150", "--replicas", "3", "--goal", "ttft<300ms")
    routers = ("--router", "prefix,round-robin,two-choices,oracle", "--html", str(tmp_path / "fleet.html"))
    found = figures(*flags, *PREFIXES, *routers)
    text = capsys.readouterr().out
    assert "law of steps: made up" in text
    assert "replica-hours" in text
    shares = {name: one["cached_share"] for name, one in found["routers"].items()}
    assert list(shares) == ["prefix", "round-robin", "two-choices", "oracle"]
    assert min(shares["prefix"], shares["oracle"]) > max(shares["round-robin"], shares["two-choices"]) > 0
    assert found["fleet"]["router"] == "prefix"
    assert found["completed"] == 150
    page = (tmp_path / "fleet.html").read_text()
    assert page.count("<svg") == 3
    assert "round-robin" in page


def test_replicas_follow_the_load(figures, capsys):
    flags = ("--request-rate", "40", "--num-prompts", "600", "--start-up", "1", "--goal", "ttft<500ms")
    found = figures(*flags, "--autoscale", "1-12")["fleet"]
    ready = [one["num_ready"] for one in found["replicas"]]
    assert ready[0] == 1
    assert 2 < max(ready) <= 12
    assert found["replica_s"] > 15
    assert "replicas ready" in capsys.readouterr().out
    queue = figures(*flags, "--autoscale", "1-12", "--scaler", "queue-length", "--open-per-replica", "2")
    assert queue["fleet"]["violated_share"] > found["violated_share"]


def test_replicas_die_and_requests_go_on(figures, capsys):
    flags = ("--request-rate", "30", "--num-prompts", "100", "--replicas", "3", "--start-up", "0.5")
    found = figures(*flags, "--fail", "0.5,1,1.5")
    assert found["fleet"]["deaths"] == 3
    assert found["fleet"]["resumed"] > 0
    assert (found["completed"], found["failed"]) == (100, 0)
    assert "3 replicas died" in capsys.readouterr().out


def test_prompts_are_computed_apart(figures, capsys):
    flags = ("--request-rate", "5", "--num-prompts", "60", "--random-input-len", "600", "--replicas", "3")
    found = figures(*flags, "--prefill-replicas", "0,1,2")["routers"]
    assert list(found) == ["prefix", "prefix, 1 + 2", "prefix, 2 + 1"]
    assert "prefix, 1 + 2" in capsys.readouterr().out
    slow = figures(*flags, "--prefill-replicas", "1", "--link-gbit", "0.01")["routers"]
    assert list(slow) == ["prefix, 1 + 2"]
    assert slow["prefix, 1 + 2"]["mean_tpot_ms"] > 2 * found["prefix, 1 + 2"]["mean_tpot_ms"]


def test_one_replica_has_the_figures_of_the_single_simulation(figures):
    flags = ("--request-rate", "20")
    alone, fleet = figures(*flags), figures(*flags, "--replicas", "1")
    for name in ("duration", "completed", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "max_itl_ms"):
        assert alone[name] == fleet[name]
    assert alone["simulation"]["steps"] == fleet["fleet"]["steps"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "0"), "--replicas 0 is out of range"),
        (("--router", "best"), "--router best is not known"),
        (("--autoscale", "5-2", "--goal", "ttft<1s"), "--autoscale 5-2 is not a range"),
        (("--autoscale", "many"), "--autoscale many is not a range"),
        (("--autoscale", "1-4"), "--autoscale needs to know the goal"),
        (("--autoscale", "1-4", "--goal", "tpot<1s"), "--autoscale needs to know the goal"),
        (("--fail", "soon"), "--fail soon is not a list of seconds"),
        (("--prefill-replicas", "2", "--replicas", "2"), "--prefill-replicas 2 leaves none to answer"),
        (("--prefill-replicas", "1-2", "--replicas", "3"), "--prefill-replicas 1-2 is not a list of numbers"),
        (("--prefill-replicas", "1", "--replicas", "2", "--fail", "3"), "for a fixed number of replicas"),
        (("--link-gbit", "10", "--replicas", "2"), "--link-gbit says how fast blocks of prompts move"),
        (
            ("--link-gbit", "0", "--replicas", "2", "--prefill-replicas", "1"),
            "--link-gbit 0 is out of range",
        ),
        (
            ("--autoscale", "1-4", "--scaler", "queue-length", "--open-per-replica", "0"),
            "--open-per-replica 0",
        ),
        (("--replicas", "2", "--start-up", "-1"), "--start-up -1 is out of range"),
        (("--replicas", "2", "--start-up", "nan"), "--start-up nan is out of range"),
        (("--replicas", "2", "--scaler", "queue-length"), "--scaler says how --autoscale decides"),
        (("--replicas", "2", "--open-per-replica", "3"), "--open-per-replica says how --autoscale decides"),
        (
            ("--autoscale", "1-4", "--goal", "ttft<1s", "--open-per-replica", "3"),
            "--open-per-replica is for --scaler queue-length",
        ),
        (("--html", "a.html"), "--html is for several replicas"),
    ],
)
def test_what_is_refused(flags, message, figures, capsys):
    figures(*flags, status=2)
    assert message in capsys.readouterr().err
