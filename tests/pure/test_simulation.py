"""Simulation: nothing is lost, the same load gives the same times, and they are those of a live engine."""

from __future__ import annotations

import asyncio
import time
from itertools import islice, pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sleeping_runner import SleepingRunner

from quire.bench.metrics import Timeline
from quire.bench.workload import (
    Arrival,
    Lengths,
    PromptVocabulary,
    Request,
    poisson,
    random_requests,
    trace_requests,
)
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.sampling_params import SamplingParams
from quire.simulation.clients import NO_BOUNDS, Bounds, Clients, Delays
from quire.simulation.clock import VirtualClock
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.saturation import offered_rate, saturation_rate, sensitivities
from quire.simulation.shares import RoofShares, at_shares, slower
from quire.simulation.simulate import Simulated, simulate
from quire.types import NewRequest

FEATURES = (*LEADING, Feature("positions"))  # one, rows, tokens, logits, positions
ROOF = (Stage((0.010, 0.0, 0.0, 0.0, 1e-5), (0.0, 0.0, 0.0005, 0.0, 0.0)),)
LAW = StepLaw(FEATURES, ROOF, (0.001, 0.0, 0.0001, 0.0, 0.0), ROOF)


def scheduler(num_blocks: int = 64, **options) -> Scheduler:
    given = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 200}
    given["num_spare_blocks"] = 0
    return Scheduler(groups=[BlockGroup(num_blocks)], **(given | options))


def asked(num_prompt: int, num_output: int, at_s: float = 0.0, token: int = 1) -> Request:
    return Request([token] * num_prompt, num_output, at_s)


def load(count: int, seed: int = 0) -> list[Request]:
    """Requests of different lengths, without a common prefix, at random moments."""
    lengths = [(5 + 7 * index % 23, 1 + 5 * index % 11) for index in range(count)]
    return list(poisson([asked(*pair, token=i) for i, pair in enumerate(lengths)], 20.0, seed))


def times(timelines: list[Timeline]) -> list[tuple[float, ...]]:
    return [(one.sent_s, *one.chunk_s) for one in timelines]


@given(
    st.integers(0, 1000), st.sampled_from([1, 2]), st.sampled_from([12, 20, 64]), st.sampled_from([None, 3])
)
def test_nothing_is_lost(seed, max_steps_in_flight, num_blocks, max_concurrency):
    planner = scheduler(num_blocks, max_steps_in_flight=max_steps_in_flight)
    bounds, delays = Bounds(max_concurrency=max_concurrency), Delays(0.003, 0.0001)
    done = simulate(planner, LAW, load(12, seed), bounds=bounds, delays=delays, num_records=10_000)
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in done.timelines] == [
        (len(request.content), request.num_output_tokens) for request in load(12, seed)
    ]
    planner.check()
    assert planner.num_free_blocks == num_blocks
    for one, request in zip(done.timelines, load(12, seed), strict=True):
        assert len(one.chunk_s) == request.num_output_tokens
        assert request.at_s == one.planned_s <= one.sent_s < one.chunk_s[0]
        assert one.chunk_s == sorted(one.chunk_s)
        assert one.chunk_s[-1] == one.end_s
    assert done.busy_s == pytest.approx(sum(record.device_s for record in done.records))
    assert done.busy_s <= done.end_s
    assert done.num_steps == len(done.records)


def test_the_same_load_gives_the_same_times():
    first, again = (simulate(scheduler(), LAW, load(20)) for _ in range(2))
    assert times(first.timelines) == times(again.timelines)
    assert first.records == again.records


def test_a_single_request_takes_what_the_law_says():
    law = LAW._replace(host_s=0.002)
    (one,) = simulate(scheduler(), law, [asked(40, 3)]).timelines
    steps = [[(0, 32)], [(32, 8)], [(40, 1)], [(41, 1)]]
    ends, now_s = [], 0.0
    for rows in steps:
        now_s += 0.002 + law.seconds(law.values(rows, 1))
        ends.append(now_s)
    assert one.chunk_s == pytest.approx(ends[1:])
    assert one.ttft_s == pytest.approx(ends[1])


def test_a_second_step_in_flight_hides_the_time_of_the_host():
    law, requests = LAW._replace(host_s=0.005), [asked(8, 20)]
    one, two = (simulate(scheduler(max_steps_in_flight=n), law, requests) for n in (1, 2))
    assert one.end_s == pytest.approx(one.busy_s + 20 * 0.005)
    assert two.end_s == pytest.approx(two.busy_s + 0.005)
    for before, after in pairwise(two.records):
        assert after.idle_s == pytest.approx(0, abs=1e-12)
        assert before.index + 1 == after.index


class FakeTime:
    """A clock that only `sleep` moves, as a quiet machine's would."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_times_are_those_of_a_live_engine_whose_steps_sleep(max_steps_in_flight, num_blocks):
    """The loop here is written as a thread that serves a queue is; the device sleeps on its own clock."""
    requests, now = load(30), FakeTime()
    live = Engine(
        scheduler(num_blocks, max_steps_in_flight=max_steps_in_flight),
        SleepingRunner(LAW, now.monotonic, now.sleep),
        clock=now.monotonic,
        num_records=10_000,
    )
    waiting, seen = list(enumerate(requests)), {}
    while waiting or live.has_work:
        if not live.has_work:
            now.sleep(max(0.0, waiting[0][1].at_s - now.now_s))
        while waiting and waiting[0][1].at_s <= now.now_s:
            index, one = waiting.pop(0)
            params = SamplingParams(max_tokens=one.num_output_tokens, ignore_eos=True)
            live.add(NewRequest(str(index), tuple(one.content), params, one.at_s))
        for output in live.step():
            seen.setdefault(int(output.request_id), []).append(now.now_s)
    planner = scheduler(num_blocks, max_steps_in_flight=max_steps_in_flight)
    found = simulate(planner, LAW, requests, num_records=10_000)
    for index, one in enumerate(found.timelines):
        assert one.chunk_s == pytest.approx(seen[index], abs=1e-9)
    assert len(found.records) == len(live.records)
    if num_blocks == 12:
        assert found.num_preemptions == live.scheduler.num_preemptions > 0
    shifted = simulate(scheduler(num_blocks), slower(LAW, 1.1), requests)
    assert times(shifted.timelines) != times(found.timelines), "another law gives other times"


def test_no_clock_of_the_machine_is_read(monkeypatch):
    def fail(*_: object) -> float:
        raise AssertionError("a simulation looked at the time of the machine")

    for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "process_time", "sleep"):
        monkeypatch.setattr(time, name, fail)
    monkeypatch.setattr(asyncio, "get_event_loop", fail)
    assert simulate(scheduler(), LAW, load(5)).end_s > 0


def test_the_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock.read() == 2.0


def test_a_client_sees_requests_and_outputs_later_than_the_engine():
    requests = [asked(8, 2, token=1), asked(8, 2, token=2)]
    near = simulate(scheduler(), LAW, requests).timelines
    far = simulate(scheduler(), LAW, requests, delays=Delays(0.5, 0.01)).timelines
    for index in (0, 1):
        later = 0.5 + 0.01 * (index + 1)
        assert far[index].chunk_s == pytest.approx([at_s + later for at_s in near[index].chunk_s])


def test_a_request_reaches_the_engine_later_than_it_was_sent():
    clients = Clients([asked(8, 2, at_s=1.0)], Delays(0.5, 0.0), NO_BOUNDS)
    assert clients.next_s == 1.5
    assert clients.take().arrival_s == 1.5
    assert clients.timelines[0].sent_s == 1.0


def test_a_closed_loop_sends_the_next_when_one_has_ended():
    requests = [asked(8, 4, at_s=9.0, token=i) for i in range(6)]
    found = simulate(scheduler(), LAW, requests, bounds=Bounds(max_concurrency=2), is_open=False).timelines
    ends = sorted(one.end_s for one in found)
    assert [one.sent_s for one in found] == [0.0, 0.0, *ends[:4]]
    assert found[0].planned_s is None


def test_an_open_loop_waits_for_room_and_counts_from_sending():
    requests = [asked(8, 4, token=i) for i in range(3)]
    found = simulate(scheduler(), LAW, requests, bounds=Bounds(max_concurrency=1)).timelines
    assert [one.planned_s for one in found] == [0.0] * 3
    assert [one.sent_s for one in found[1:]] == [one.end_s for one in found[:2]]
    assert found[2].ttft_s == pytest.approx(found[0].ttft_s)


def test_no_request_is_sent_after_the_end_of_a_run():
    requests = [asked(8, 2, at_s) for at_s in (0.0, 1.0, 2.0, 3.0)]
    assert len(simulate(scheduler(), LAW, requests, bounds=Bounds(until_s=2.0)).timelines) == 3
    endless = (asked(8, 2, token=i % 50) for i in range(10**9))
    bounds = Bounds(max_concurrency=2, until_s=1.0)
    found = simulate(scheduler(), LAW, endless, bounds=bounds, is_open=False)
    assert 1.0 < found.end_s < 1.2
    assert len(found.timelines) > 20


def test_a_run_may_end_with_its_first_requests():
    whole, part = (simulate(scheduler(), LAW, load(30), num_first=n) for n in (None, 5))
    assert times(part.timelines[:5]) == times(whole.timelines[:5])
    assert part.num_steps < whole.num_steps


@pytest.mark.parametrize("bounds", [Bounds(max_queued_requests=3), Bounds(max_queued_tokens=30)])
def test_a_full_queue_refuses(bounds):
    requests = [asked(10, 3, token=i) for i in range(5)]
    found = simulate(scheduler(max_num_seqs=1), LAW, requests, bounds=bounds).timelines
    assert [one.is_rejected for one in found] == [False] * 3 + [True] * 2
    assert [one.error for one in found[3:]] == ["the queue is full"] * 2
    later = [*requests, asked(10, 3, at_s=found[0].end_s, token=9)]
    assert not simulate(scheduler(max_num_seqs=1), LAW, later, bounds=bounds).timelines[5].is_rejected


def test_what_can_never_run_is_refused_and_leaves_the_queue():
    requests = [asked(500, 3), asked(8, 2, token=2)]
    bad, good = simulate(scheduler(), LAW, requests, bounds=Bounds(max_queued_requests=1)).timelines
    assert "maximum context length is 200 tokens" in bad.error
    assert not bad.is_rejected
    assert good.num_output_tokens == 2


def test_common_prefixes_are_shared():
    requests = [asked(41, 2), asked(41, 2, at_s=5.0), asked(41, 2, at_s=10.0, token=2)]
    found = simulate(scheduler(), LAW, requests).timelines
    assert [one.num_cached_tokens for one in found] == [0, 40, 0]
    assert found[1].ttft_s < found[0].ttft_s == pytest.approx(found[2].ttft_s)


def test_shares_of_the_roof_and_a_slower_law():
    values = LAW.values([(10, 4)], 1)
    half = at_shares(LAW, RoofShares(memory=0.5, arithmetic=0.5, step_s=0.003, row_s=0.001))
    assert half.seconds(values) == pytest.approx(2 * LAW.roof_s(values) + 0.003 + 0.001)
    assert half.roof_s(values) == LAW.roof_s(values)
    only_memory = at_shares(LAW, RoofShares(memory=0.5))
    assert only_memory.seconds(only_memory.values([(0, 1)], 1)) == pytest.approx(2 * 0.01001)
    only_arithmetic = at_shares(LAW, RoofShares(arithmetic=0.5))
    assert only_arithmetic.seconds(only_arithmetic.values([(0, 100)], 1)) == pytest.approx(0.1)
    doubled = slower(LAW._replace(host_s=0.001), 2.0)
    assert doubled.seconds(values) == pytest.approx(2 * LAW.seconds(values))
    assert doubled.host_s == 0.002


def test_text_is_no_simulated_prompt():
    with pytest.raises(TypeError, match="token ids"):
        simulate(scheduler(), LAW, islice([Request("some text", 3)], 1))


def test_synthetic_prompts_are_equal_where_drawn_ones_are(tmp_path):
    """Blocks of a trace with equal ids, and prefixes of random requests; nothing else."""
    trace = [Arrival(0.0, 1000, 3, (1, 2)), Arrival(1.0, 1300, 3, (1, 2, 3)), Arrival(2.0, 600, 3, (4, 2))]
    lengths = Lengths(20, 3, 0.5, num_prefix_tokens=8, num_prefixes=2)

    def shared(words: PromptVocabulary) -> list[list[int]]:
        """The number of leading tokens that each two prompts have in common."""
        found = [*trace_requests(trace, words, 0, speed=1.0, longest=None)]
        found += islice(random_requests(lengths, words, 0), 6)
        prompts = [one.content for one in found]
        return [[sum(1 for _ in takewhile(bool, map(int.__eq__, a, b))) for b in prompts] for a in prompts]

    drawn = shared(PromptVocabulary(range(10**6)))
    assert shared(BlockVocabulary()) == drawn
    assert drawn[0][1] == 1000
    assert drawn[0][2] == 0


def test_saturation_is_the_rate_of_a_full_engine():
    """One after the other, each request takes a step of its prompt and one for each further token."""
    law = LAW._replace(stages=(), overhead=(0.01, 0.0, 0.0, 0.0, 0.0))
    rate = saturation_rate(scheduler(max_num_seqs=1), law, [asked(8, 5, token=i) for i in range(40)])
    assert rate == pytest.approx(1 / 0.05, rel=0.02)
    rate = saturation_rate(scheduler(max_num_seqs=4), law, [asked(8, 5, token=i) for i in range(40)])
    assert rate == pytest.approx(4 / 0.05, rel=0.1)
    assert offered_rate([asked(1, 1, at_s) for at_s in (2.0, 2.5, 3.0)]) == 2.0
    assert offered_rate([asked(1, 1, 2.0)]) == 0.0


def test_waiting_is_more_sensitive_to_the_time_of_steps_near_saturation():
    def waiting(rate: float) -> float:
        requests = list(poisson((asked(8, 5, token=i) for i in range(200)), rate, 1))
        law = LAW._replace(stages=(), overhead=(0.01, 0.0, 0.0, 0.0, 0.0))

        def run(law: StepLaw) -> Simulated:
            return simulate(scheduler(max_num_seqs=1), law, requests)

        faster, slow = sensitivities(run, law, run(law))
        assert faster.tpot == pytest.approx(0.98)
        assert slow.tpot == pytest.approx(1.02)
        assert faster.ttft < 1 < slow.ttft
        return slow.ttft

    assert 1.02 < waiting(6.0) < waiting(19.0)
