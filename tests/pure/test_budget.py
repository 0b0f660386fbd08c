"""Steps bounded by time: chunks that keep a goal by a law, whatever the law is."""

from __future__ import annotations

from collections import deque
from itertools import count

import pytest
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.budget import CHUNK_WITHOUT_LAW, LEAST_CHUNK, StepTime
from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import Feature
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Step

FEATURES = (
    Feature("one"),
    Feature("rows"),
    Feature("tokens"),
    Feature("logits"),
    Feature("positions"),
    Feature("pairs"),
    Feature("pairs", window=64),
    Feature("experts", chosen=2, num_experts=8),
)
NUM_ZEROS = len(FEATURES) - 3
LAW = StepLaw(  # 5 ms of weights or 0.4 ms a token, 1 ms and 0.1 ms a row
    FEATURES,
    (Stage((5e-3,) + (0.0,) * 7, (0.0, 0.0, 4e-4) + (0.0,) * NUM_ZEROS),),
    (1e-3, 1e-4, 0.0) + (0.0,) * NUM_ZEROS,
    (),
    tail=1.0,
)


def scheduler_of(**limits) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096} | limits
    return Scheduler(groups=[BlockGroup(4096)], block_size=16, enable_prefix_caching=False, **limits)


def request(name: str, num_prompt: int, max_tokens: int = 100) -> NewRequest:
    return NewRequest(name, tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def predicted_s(law: StepLaw, step: Step) -> float:
    rows = [(row.start, row.count) for row in step.rows]
    return law.seconds(law.values(rows, sum(row.num_logits for row in step.rows)))


class Steps:
    """The steps of a scheduler; every token is what the fake runner computes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runner = FakeRunner(scheduler.caches.groups, scheduler.block_size)
        self.now = count()

    def next(self) -> Step:
        step = self.scheduler.schedule(next(self.now))
        assert step is not None
        self.scheduler.commit(step, self.runner.launch(step).result(), next(self.now))
        return step

    def chunk(self) -> int:
        """The tokens of the next step but one for each generating sequence."""
        return sum(row.count for row in self.next().rows if row.count > 1)


def test_chunks_are_as_long_as_the_goal_allows():
    steps = Steps(scheduler_of(itl_goal_s=0.06))
    steps.scheduler.calibrate(LAW)
    for name in "abcd":
        steps.scheduler.add(request(name, 20))
    steps.next()
    steps.scheduler.add(request("long", 1000))
    step = steps.next()
    chunk = step.rows[-1].count
    assert [row.count for row in step.rows] == [1, 1, 1, 1, chunk]
    # 1 ms + 5 * 0.1 ms + (4 + chunk) * 0.4 ms <= 60 ms
    assert chunk == 136
    assert predicted_s(LAW, step) <= 0.06 < predicted_s(LAW, step) + 8 * 4e-4


def test_the_tail_and_the_host_shorten_chunks():
    steps = Steps(scheduler_of(itl_goal_s=0.06))
    steps.scheduler.add(request("a", 20))
    steps.next()
    steps.scheduler.add(request("long", 4000, 8))
    chunks = []
    for law in (
        LAW,
        LAW._replace(host_s=0.019),
        LAW._replace(tail=1.5),
        LAW._replace(host_s=0.019, tail=1.5),
    ):
        steps.scheduler.calibrate(law)
        chunks.append(steps.chunk())
    assert chunks == [144, 96, 96, 48]


def test_bounds_in_tokens_hold_under_a_goal():
    for bounds, expected in (({"max_num_prefill_tokens": 30}, 30), ({"max_num_batched_tokens": 64}, 63)):
        steps = Steps(scheduler_of(itl_goal_s=10.0, **bounds))
        steps.scheduler.calibrate(LAW)
        steps.scheduler.add(request("a", 20))
        steps.next()
        steps.scheduler.add(request("long", 1000))
        assert steps.chunk() == expected


def test_without_a_law_chunks_are_short():
    steps = Steps(scheduler_of(itl_goal_s=0.06))
    steps.scheduler.add(request("a", 20))
    steps.scheduler.add(request("long", 1000))
    assert steps.chunk() == 512  # nothing generates: "a" and most of the long prompt
    assert steps.chunk() == CHUNK_WITHOUT_LAW
    steps.scheduler.calibrate(LAW._replace(tail=0.0))
    assert steps.chunk() == CHUNK_WITHOUT_LAW
    steps.scheduler.calibrate(LAW)
    assert steps.chunk() == 144


def test_nothing_is_cut_beside_sequences_that_do_not_generate():
    steps = Steps(scheduler_of(itl_goal_s=0.001))
    steps.scheduler.calibrate(LAW)
    steps.scheduler.add(request("long", 1000))
    assert [steps.chunk(), steps.chunk()] == [512, 488]


def test_sequences_wait_until_they_can_join_within_the_goal():
    # With chunks of 16: 1 ms + (n + 1) * 0.1 ms + (n + 16) * 0.4 ms <= 9 ms, so n is at most 3.
    steps = Steps(scheduler_of(itl_goal_s=0.009))
    steps.scheduler.calibrate(LAW)
    for name in "abcde":
        steps.scheduler.add(request(name, 20, max_tokens=10))
    steps.next()  # nothing generates yet: the bound is for later
    assert steps.scheduler.num_running == 3
    for name in "fgh":
        steps.scheduler.add(request(name, 700, max_tokens=80))
    most = 0
    while steps.scheduler.has_work:
        step = steps.next()
        most = max(most, len(step.rows))
        if any(row.count == 1 for row in step.rows):
            assert predicted_s(LAW, step) <= 0.009
    assert most == 3


def test_a_goal_that_cannot_be_kept_computes_the_least_chunk():
    steps = Steps(scheduler_of(itl_goal_s=0.02))
    steps.scheduler.calibrate(LAW)
    steps.scheduler.add(request("a", 20, max_tokens=400))
    steps.next()
    steps.scheduler.add(request("long", 100))
    assert steps.chunk() == 40
    steps.scheduler.calibrate(LAW._replace(host_s=1.0))  # no step is short enough any more
    assert [steps.chunk() for _ in range(5)] == [LEAST_CHUNK, LEAST_CHUNK, LEAST_CHUNK, 12, 0]
    steps.scheduler.add(request("late", 10))
    assert steps.chunk() == 0
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (2, 1)


def taken(time: StepTime, count: int) -> int:
    """How many tokens of a prompt fit in, which are then counted in."""
    if fitting := time.cut(0, count):
        time.add(0, fitting)
    return fitting


def test_a_second_prompt_gets_the_rest_of_the_time_or_nothing():
    for second, expected in ((100, 64), (64, 64)):
        time = StepTime(LAW, 0.06, [(100, 1)], [])
        assert taken(time, 80) == 80
        assert taken(time, second) == expected
        assert taken(time, second) == 0
    time = StepTime(LAW, 0.06, [(100, 1)], [])
    assert [taken(time, 140), taken(time, 30), taken(time, 1)] == [140, 0, 1]


def test_logits_of_every_token_take_time():
    coefficients = (0.0, 0.0, 0.0, 1e-3) + (0.0,) * (NUM_ZEROS - 1)
    law = LAW._replace(overhead=coefficients)
    plain, scored = (StepTime(law, 0.06, [(9, 1)], []).cut(0, 500, scored) for scored in (False, True))
    assert (plain, scored) == (136, 40)


coefficient = st.sampled_from([0.0, 0.0, 1e-6, 1e-4, 1e-3, 1e-2])
coefficients = st.tuples(*[coefficient] * len(FEATURES))
laws = st.builds(
    StepLaw,
    st.just(FEATURES),
    st.lists(st.builds(Stage, coefficients, coefficients), min_size=1, max_size=3).map(tuple),
    coefficients,
    st.just(()),
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.sampled_from([0.0, 1.0, 1.2, 3.0]),
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 90), st.integers(1, 12)),
        st.tuples(st.just("calibrate"), laws),
        st.tuples(st.just("step"), st.integers(1, 10)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
    ),
    max_size=12,
)
limits_of_schedulers = st.fixed_dictionaries(
    {
        "itl_goal_s": st.sampled_from([1e-4, 1e-2, 0.06, 1.0]),
        "max_num_batched_tokens": st.sampled_from([2, 20, 80]),
        "max_num_prefill_tokens": st.sampled_from([None, 1, 30]),
        "max_num_seqs": st.integers(1, 6),
        "max_steps_in_flight": st.integers(1, 2),
        "policy": st.sampled_from(["fcfs", "fair"]),
    }
)


class History:
    """The calls of a test made on one scheduler, and the steps it planned."""

    def __init__(self, limits) -> None:
        self.scheduler = scheduler_of(**limits)
        self.runner = FakeRunner(self.scheduler.caches.groups, self.scheduler.block_size)
        self.in_flight = deque()
        self.steps: list[Step] = []
        self.law: StepLaw | None = None
        self.now = count()
        self.num_requests = 0

    def call(self, name: str, *values) -> None:
        if name == "add":
            self.scheduler.add(request(str(self.num_requests), *values))
            self.num_requests += 1
        elif name == "calibrate":
            (self.law,) = values
            self.scheduler.calibrate(*values)
        elif name == "abort":
            self.scheduler.abort(str(self.num_requests - 1 - values[0]), next(self.now))
        else:
            for _ in range(values[0]):
                self.step()

    def step(self) -> None:
        while len(self.in_flight) < self.scheduler.max_steps_in_flight and self.launch():
            pass
        if self.in_flight:
            step, pending = self.in_flight.popleft()
            self.scheduler.commit(step, pending.result(), next(self.now))
            self.scheduler.check()

    def launch(self) -> bool:
        running = list(self.scheduler._running.values())
        generating = {
            c.slot for c in running if c.num_ahead - c.num_planned == 1 and c.num_ahead < c.request.max_known
        }
        alone = not self.in_flight
        step = self.scheduler.schedule(next(self.now))
        if step is None:
            return False
        scheduler = self.scheduler
        assert 0 < step.num_tokens <= scheduler.max_num_batched_tokens
        if running and alone:
            assert step.rows[0].slot == running[0].slot, "the oldest does not advance"
        chunks = [row.count for row in step.rows if row.slot not in generating]
        if generating and chunks:
            self.check_chunks(step, chunks)
        self.steps.append(step)
        self.in_flight.append((step, self.runner.launch(step)))
        return True

    def check_chunks(self, step: Step, chunks: list[int]) -> None:
        budget = self.scheduler._budget
        assert sum(chunks) <= budget.max_num_prefill_tokens
        if self.law is None or not self.law.tail:
            assert sum(chunks) <= CHUNK_WITHOUT_LAW
        elif sum(chunks) > LEAST_CHUNK:
            assert predicted_s(self.law, step) <= self.law.limit_s(budget.itl_goal_s) + 1e-12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(limits=limits_of_schedulers, history=calls)
def test_any_law_keeps_bounds_advances_all_and_replays(limits, history):
    first, again = History(limits), History(limits)
    for run in (first, again):
        for call in history:
            run.call(*call)
        for _ in range(10_000):
            if not run.scheduler.has_work and not run.in_flight:
                break
            run.step()
        assert not run.scheduler.has_work, "a request starves"
    assert first.steps == again.steps


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 511])
def test_a_prompt_that_fits_is_not_cut(count):
    assert StepTime(LAW, 10.0, [(5, 1)], []).cut(0, count) == count


def test_a_promised_last_token_does_not_shorten_chunks():
    scheduler = scheduler_of(max_num_prefill_tokens=10, max_num_batched_tokens=32, max_steps_in_flight=2)
    scheduler.add(request("a", 20, max_tokens=1))
    scheduler.add(request("long", 100))
    assert [row.count for row in scheduler.schedule(0.0).rows] == [20, 12]
    assert [row.count for row in scheduler.schedule(1.0).rows] == [32]
