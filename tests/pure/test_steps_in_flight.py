"""Two steps in flight: what is planned with promised tokens, and what becomes of rows that come too late."""

from __future__ import annotations

from collections import deque

import pytest
from fake_runner import FakeRunner, Launched, Received
from test_engine import Clock, ask, make_engine
from test_scheduler import Run, check_findable, shape

from quire.engine.engine import Engine
from quire.errors import EngineDead
from quire.types import Output, Step


class Ahead(Run):
    """Plans and collects one at a time."""

    def __init__(self, *, eager: bool = False, **limits) -> None:
        super().__init__(**{"max_steps_in_flight": 2} | limits)
        self.runner.eager = eager
        self.in_flight: deque[tuple[Step, Launched]] = deque()

    def plan(self) -> Step | None:
        self.now += 1.0
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self.in_flight.append((step, self.runner.launch(step)))
        self.scheduler.check()
        return step

    def collect(self) -> list[Output]:
        step, pending = self.in_flight.popleft()
        outputs = self.scheduler.commit(step, pending.result(), self.now + 0.5)
        self.received.take(outputs)
        self.scheduler.check()
        return outputs

    def step(self, during=lambda: None) -> tuple[Step, list[Output]]:
        while len(self.in_flight) < self.scheduler.max_steps_in_flight and self.plan():
            pass
        during()
        return self.in_flight[0][0], self.collect()

    def finish(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
        super().finish()


def test_a_row_is_planned_for_a_token_that_the_device_alone_knows():
    run = Ahead()
    run.add("a", 5)
    assert shape(run.plan()) == [(0, 0, 5, True)]
    ahead = run.plan()
    assert shape(ahead) == [(0, 5, 1, True)]
    assert ahead.rows[0].token_ids == ()
    assert len(run.collect()[0].token_ids) == 1
    assert shape(run.plan()) == [(0, 6, 1, True)]
    run.finish()


def test_chunks_of_a_prompt_are_planned_ahead_too():
    run = Ahead(max_num_batched_tokens=4)
    run.add("a", 11)
    assert [shape(run.plan()), shape(run.plan())] == [[(0, 0, 4, False)], [(0, 4, 4, False)]]
    run.finish()


def test_nothing_is_planned_past_the_length_that_ends_a_sequence():
    run = Ahead()
    run.add("a", 5, max_tokens=2, ignore_eos=True)
    run.plan()
    run.plan()
    assert run.collect()
    assert run.plan() is None
    assert run.collect()[0].finish_reason == "length"
    run.finish()
    assert run.runner.num_computed == 6  # no row was for nothing


@pytest.mark.parametrize("eager", [True, False])
def test_a_row_that_was_planned_past_an_end_token_is_dropped(eager):
    run = Ahead(eager=eager)
    tokens = Ahead()
    new = tokens.add("a", 5, max_tokens=9, ignore_eos=True)
    tokens.finish()
    second = tokens.received.token_ids["a", 0][1]
    assert second != tokens.received.token_ids["a", 0][0]
    run.add("a", new.prompt_token_ids, max_tokens=9, stop_token_ids=(second,), ignore_eos=True)
    run.add("b", 7, max_tokens=9)
    run.step()
    _, outputs = run.step()
    assert ("a", "stop") in [(out.request_id, out.finish_reason) for out in outputs]
    (late, _), *_ = run.in_flight
    assert len(late.rows) == 2  # one of them for nothing
    run.add("c", 7)
    step = run.plan()
    assert step.released == (0,)
    assert [(a.slot, a.request_id) for a in step.admitted] == [(0, "c")]
    assert [out.request_id for out in run.collect()] == ["b"]
    run.finish()


@pytest.mark.parametrize("eager", [True, False])
def test_blocks_of_a_dropped_row_may_be_granted_at_once(eager):
    """With three blocks, what a dropped row of "a" writes to is granted to "b" in the next step."""
    run = Ahead(eager=eager, num_blocks=3, max_num_seqs=1, enable_prefix_caching=False)
    run.add("a", 8, max_tokens=5, ignore_eos=True)
    run.add("b", [9] * 12, max_tokens=1, ignore_eos=True)
    run.plan()
    ahead = run.plan()
    run.abort("a")
    run.collect()
    step = run.plan()
    assert {block for grant in ahead.granted for block in grant.block_ids} < {
        block for grant in step.granted for block in grant.block_ids
    }
    run.finish()


def test_blocks_are_findable_only_when_their_step_was_committed():
    run = Ahead(max_num_batched_tokens=8)
    run.add("a", 16)
    run.plan()
    run.plan()
    check_findable(run, 0)
    run.collect()
    check_findable(run, 2)
    run.collect()
    check_findable(run, 4)
    run.finish()


def test_a_preemption_loses_no_token_of_a_row_in_flight():
    run = Ahead(max_num_batched_tokens=64)
    run.add("a", 6, max_tokens=9, ignore_eos=True)
    run.add("b", [9] * 6, max_tokens=9, ignore_eos=True)
    run.plan()
    preempted = run.scheduler._requests["b"].sequences[0]
    run.scheduler._preempt(preempted, 0.0)  # there is room for it, but it waits for the promised token
    step = run.plan()
    assert (step.released, step.admitted) == ((1,), ())
    assert (preempted.num_known, preempted.num_ahead) == (6, 7)
    run.collect()
    assert (preempted.num_known, preempted.num_ahead, preempted.num_computed) == (7, 7, 0)
    step = run.plan()
    assert [a.request_id for a in step.admitted] == ["b"]
    assert len(step.rows[-1].token_ids) == 7
    run.finish()


def test_a_sequence_takes_no_blocks_from_others_before_its_own_rows_are_taken_in():
    """The step in flight gives the youngest its last token."""
    run = Ahead(num_blocks=4, num_spare_blocks=0)
    run.add("old", [1] * 8, max_tokens=5, ignore_eos=True)
    run.add("young", [2] * 8, max_tokens=1, ignore_eos=True)
    run.plan()
    assert run.plan() is None
    run.finish()
    assert run.scheduler.num_preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_share_their_prompt(caching):
    run = Ahead(max_num_batched_tokens=8, enable_prefix_caching=caching)
    run.add("a", 19, n=4, ignore_eos=True)
    run.finish()
    assert run.runner.num_computed == 19 + 3 * 3 + 4 * 3


def test_prompt_logprobs_are_gathered_from_chunks_in_flight():
    run = Ahead(max_num_batched_tokens=4)
    run.add("a", 11, prompt_logprobs=0, n=2)
    run.add("b", [3] * 11, prompt_logprobs=0, n=2)
    run.finish()
    assert [len(got) for got in run.received.prompt_logprobs.values()] == [10, 10]


def test_a_grammar_that_runs_keeps_others_from_being_planned_ahead():
    run = Ahead(max_num_seqs=2)
    run.add("a", 5, max_tokens=9, ignore_eos=True)
    run.add("b", 5, max_tokens=2, ignore_eos=True, grammar="g")
    run.plan()
    assert run.plan() is None  # the next token of "b" is masked after the last
    run.collect()
    assert len(run.plan().rows) == 2
    assert run.plan() is None
    assert run.collect()[-1].finish_reason == "length"
    run.plan()
    assert len(run.plan().rows) == 1
    run.finish()


def test_what_failed_ends_and_its_row_in_flight_is_dropped():
    run = Ahead(failing=["a"])
    run.add("a", 5)
    run.add("b", 5)
    run.finish()
    assert run.received.final["a", 0].finish_reason == "error"


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_more_steps_than_allowed_are_refused(max_steps_in_flight):
    run = Ahead(max_steps_in_flight=max_steps_in_flight)
    run.add("a", 5)
    for _ in range(max_steps_in_flight):
        run.plan()
    with pytest.raises(RuntimeError, match="were not committed"):
        run.scheduler.schedule(0.0)
    (first, pending), *_ = run.in_flight
    newest = run.in_flight[-1][0]
    if newest is not first:
        with pytest.raises(RuntimeError, match="not the oldest in flight"):
            run.scheduler.commit(newest, pending.result(), 0.0)
    run.finish()


# The engine


class TimedRunner(FakeRunner):
    """A device that begins each step a second after the last ended, and computes for ten."""

    now_s = 100.0

    def compute(self, step):
        result = super().compute(step)
        self.now_s += 11.0
        return type(result)(result.rows, self.now_s - 10.0, self.now_s)


def make_ahead(runner=None, **limits) -> Engine:
    engine = make_engine(max_steps_in_flight=2, **limits)
    return Engine(engine.scheduler, runner or engine.runner, clock=Clock())


def test_the_engine_launches_the_next_step_before_it_collects_one():
    launched = []

    class Watched(FakeRunner):
        def launch(self, step):
            launched.append(step.index)
            return super().launch(step)

    engine = make_ahead(Watched(16, 4))
    engine.add(ask("a", max_tokens=4, ignore_eos=True))
    tokens = []
    for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]):
        tokens += [token for out in engine.step() for token in out.token_ids]
        assert launched == expected
    assert len(tokens) == 4
    assert not engine.has_work


def test_a_step_in_flight_is_work_until_it_was_collected():
    engine = make_ahead()
    engine.add(ask("a", max_tokens=9, ignore_eos=True))
    engine.step()
    engine.abort("a")
    assert not engine.scheduler.has_work
    assert engine.has_work
    (output,) = engine.step()
    assert output.finish_reason == "abort"
    assert not engine.has_work
    assert engine.scheduler.num_free_blocks == 16


def test_a_row_too_many_is_collected_before_the_engine_rests():
    engine = make_ahead()
    engine.add(ask("a", max_tokens=9, stop_token_ids=tuple(range(23))))
    (output,) = engine.step()
    assert output.finish_reason == "stop"
    assert not engine.scheduler.has_work
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work
    engine.scheduler.check()


def test_outputs_are_the_same_however_many_steps_are_in_flight():
    outputs = []
    for engine in (make_engine(), make_ahead()):
        received = Received()
        for request in (ask("a", n=3), ask("b", max_tokens=3), ask("c", prompt=range(20))):
            engine.add(request)
        while engine.has_work:
            received.take(engine.step())
        assert not engine.scheduler.has_work
        outputs.append((received.token_ids, received.logprobs))
    assert outputs[0] == outputs[1]


def test_a_record_tells_how_long_the_device_waited():
    engine = make_ahead(TimedRunner(16, 4))
    engine.clock = lambda: 95.0
    engine.add(ask("a", max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert [(record.device_s, record.idle_s) for record in engine.records] == [
        (10.0, 6.0),  # since it was planned
        (10.0, 1.0),  # since the last one ended
        (10.0, 1.0),
    ]
    engine.clock = lambda: 200.0  # nothing was open for a while
    engine.add(ask("b", max_tokens=1))
    engine.runner.now_s = 202.0
    engine.step()
    assert engine.records[-1].idle_s == 3.0


def test_a_pause_after_a_row_too_many_is_no_waiting():
    engine = make_ahead(TimedRunner(16, 4, eager=True))
    engine.clock = lambda: 95.0
    engine.add(ask("a", max_tokens=9, stop_token_ids=tuple(range(23))))
    engine.step()  # one more is in flight, and ended
    engine.runner.now_s = 1000.0
    engine.clock = lambda: 998.0
    engine.add(ask("b", max_tokens=1))
    while engine.has_work:
        engine.step()
    assert [record.idle_s for record in engine.records] == [6.0, 0.0, 3.0]


def test_a_step_that_began_before_it_could_be_missed_was_not_waited_for():
    engine = make_ahead(TimedRunner(16, 4))
    engine.clock = lambda: 150.0
    engine.add(ask("a", max_tokens=1))
    engine.step()
    assert engine.records[-1].idle_s == 0.0


def test_a_failure_at_collection_kills_the_engine():
    class Broken(FakeRunner):
        def compute(self, step):
            raise ValueError("no such kernel")

    engine = make_ahead(Broken(16, 4))
    engine.add(ask("a"))
    for _ in range(2):
        with pytest.raises(EngineDead, match="ValueError: no such kernel"):
            engine.step()
    assert not engine.has_work
