"""The experiment "fleet", with a made-up law: what it says of routers, replicas and the load."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.engine.step_law import Stage, StepLaw
from quire.errors import QuireError
from quire.experiments import fleet
from quire.experiments.served_engine import FleetTask, ServedEngine
from quire.program.features import LEADING, Feature
from quire.routing.scaling import Observed
from quire.simulation.law_file import KnownLaw, as_json

STAGE = Stage((0.010, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 1e-3, 0.0, 0.0), "products")
LAW = StepLaw((*LEADING, Feature("positions")), (STAGE,), (0.001, 0.0005, 0.0, 0.0, 0.0), (STAGE,))
LIMITS = RequestLimits(1024, (BlockGroup(512, None),), 16, 512)
CONFIG = EngineConfig(max_num_seqs=4, max_num_prefill_tokens=48)


def task(limits=LIMITS, **asked):
    served = ServedEngine.of(as_json(KnownLaw(LAW, source="made up")), limits, CONFIG)
    return FleetTask(served=served, **asked)


def of(lines, name):
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def lines():
    """The lines for two replicas under more load than they could take without their caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "MAX_S", 600.0)  # all runs, also beside other work
        return list(fleet.run(task(replicas=2, load=8, num_requests=120)))


def test_the_setting_is_reported_first(lines):
    setup = lines[0]["setup"]
    assert setup["law"] == "made up"
    assert setup["fitted"] is False
    assert (setup["replicas"], setup["autoscaling"], setup["death"]) == (2, False, False)
    assert setup["peak_requests_per_s"] == pytest.approx(8 * setup["one_requests_per_s"])
    assert setup["prompt_tokens"] == [64, 464]
    mean_rate = setup["num_requests"] / setup["load_s"]
    assert mean_rate * (1 + fleet.SWING) == pytest.approx(setup["peak_requests_per_s"])


def test_routing_by_prefix_finds_most_cached_and_is_late_least(lines):
    routers = of(lines, "router")
    assert [one["router"] for one in routers] == list(fleet.ROUTERS)
    turns, two, prefix = routers
    assert prefix["cached_share"] > 1.3 * max(turns["cached_share"], two["cached_share"]) > 0
    assert prefix["violated_share"] < min(turns["violated_share"], two["violated_share"])
    assert prefix["p50_ttft_ms"] < min(turns["p50_ttft_ms"], two["p50_ttft_ms"])
    for one in routers:
        assert one["replica_hours"] == pytest.approx(2)
        assert [share for share, _ in one["ttft_ms"]] == list(fleet.SHARES)
        assert all(low <= high for (_, low), (_, high) in pairwise(one["ttft_ms"]))
        late = next((share for share, value in one["ttft_ms"] if value > lines[0]["setup"]["goal_ms"]), 100)
        assert 100 * (1 - one["violated_share"]) == pytest.approx(late, abs=2)


def test_more_replicas_are_late_less_and_cost_more(lines):
    scaled, *fixed = of(lines, "size")
    assert (scaled["autoscaling"], scaled["num_replicas"]) == (True, 2)
    assert scaled["replica_hours"] < 2
    assert [one["num_replicas"] for one in fixed] == [1, 2, 3, 4]
    assert [one["replica_hours"] for one in fixed] == pytest.approx([1, 2, 3, 4])
    assert fixed[0]["violated_share"] > 0.5 > 0.1 > fixed[-1]["violated_share"]
    prefix = of(lines, "router")[-1]
    assert fixed[1].items() <= prefix.items()


def test_the_progress_ends_with_the_runs(lines):
    progress = of(lines, "progress")
    assert progress == sorted(progress)
    assert progress[-1] == 1
    assert lines[-1]["done"]["is_complete"] is True


def test_a_replica_dies_at_the_peak_and_another_one_starts():
    experiment = fleet.FleetExperiment(task(replicas=2, load=3, num_requests=100, death=True))
    done = experiment.run("two-choices", 2, scales=False)
    (dead,) = [one for one in done.lives if one.has_died]
    assert dead.gone_s == pytest.approx(experiment.load_s / 2)
    assert len(done.lives) == 3
    assert done.lives[2].started_s == dead.gone_s
    assert done.lives[2].ready_s - dead.gone_s == pytest.approx(experiment.described()["start_up_s"])
    assert done.num_resumed > 0
    assert not any(one.error for one in done.timelines)
    number = done.lives.index(dead)
    opened = fleet._open_requests(done)
    width_s = done.end_s / fleet.NUM_PIECES
    after = int(dead.gone_s / width_s) + 1
    assert sum(opened[number][:after]) > 0 == sum(opened[number][after:])
    before = int(done.lives[2].ready_s / width_s)
    assert sum(opened[2][before:]) > 0 == sum(opened[2][:before])
    # Every second of every request is on one replica, but for those with none.
    spent_s = sum(one.end_s - one.sent_s for one in done.timelines)
    assert sum(map(sum, opened)) * width_s == pytest.approx(spent_s, rel=0.01)


def test_scaling_follows_the_load():
    experiment = fleet.FleetExperiment(task(replicas=6, load=6, num_requests=200, autoscaling=True))
    done = experiment.run("prefix", 6, scales=True)
    assert all(one.num_ready + one.num_starting <= 6 for one in done.counts)
    assert done.replica_s / done.end_s < 5
    first = [one.num_ready for one in done.counts if one.at_s < experiment.load_s / 4]
    peak = [one.num_ready for one in done.counts if abs(one.at_s / experiment.load_s - 0.55) < 0.15]
    assert max(peak) > max(first)


def test_a_scaler_sees_its_own_time():
    seen = []

    class Noting:
        interval_s = 5.0

        def target(self, observed):
            seen.append(observed)
            return 3

    scaler = fleet.ScalerOnScale(Noting(), 100.0)
    assert scaler.interval_s == 0.05
    assert scaler.target(Observed(0.3, 2, (0.01, 0.02), num_open=7)) == 3
    (observed,) = seen
    assert observed.at_s == pytest.approx(30)
    assert observed.starting_s == pytest.approx((1, 2))
    assert (observed.num_ready, observed.num_open) == (2, 7)


def test_requests_are_turns_of_conversations_with_a_peak_in_the_middle():
    requests = fleet.FleetExperiment(task(load=2, num_requests=400)).requests
    assert len(requests) == 400
    prompts = [tuple(one.content) for one in requests]
    known = {prompt + (0,) * one.num_output_tokens for prompt, one in zip(prompts, requests, strict=True)}
    later = [prompt for prompt in prompts if len(prompt) > 64]
    assert len(later) > 200
    assert all(prompt[:-64] in known for prompt in later)
    assert len(set(prompts)) == 400
    end_s = requests[-1].at_s
    thirds = [sum(low <= 3 * one.at_s / end_s < low + 1 for one in requests) for low in range(3)]
    assert thirds[1] > 1.5 * max(thirds[0], thirds[2])


def test_lengths_are_those_that_the_engine_takes():
    experiment = fleet.FleetExperiment(
        task(RequestLimits(48, (BlockGroup(512, None),), 16, 512), load=1, num_requests=50)
    )
    assert max(len(one.content) + one.num_output_tokens for one in experiment.requests) == 48
    done = experiment.run("round-robin", 2, scales=False)
    assert not any(one.error for one in done.timelines)


def test_an_engine_that_can_take_no_conversation_is_refused():
    with pytest.raises(QuireError, match="too small"):
        next(fleet.run(task(RequestLimits(1, (BlockGroup(512, None),), 16, 512), num_requests=20)))


def test_no_run_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(fleet, "MAX_S", 0.0)
    lines = list(fleet.run(task(num_requests=20)))
    assert [list(line) for line in lines] == [["setup"], ["done"]]
    assert lines[-1]["done"]["is_complete"] is False
