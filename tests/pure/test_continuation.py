"""Requests that one engine began and another continues: no token is lost, given twice, or another one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from fake_runner import FakeRunner, Received, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_machine import make_params, models, prompts

from quire.engine.caches import BlockGroup, Group
from quire.engine.engine import validate
from quire.engine.open_request import OpenRequest, OpenRequests
from quire.engine.scheduler import Scheduler
from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output, RequestMetrics

MAX_MODEL_LEN = 40


class Nobody:
    """Runs no request."""

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        raise AssertionError(request_id)

    def abort_later(self, own: OpenRequest) -> None:
        raise AssertionError(own.request.request_id)


class Fleet:
    """Open requests, and the engine that has them now; `die` takes the next one."""

    def __init__(self, groups: tuple[Group, ...], **limits: Any) -> None:
        self.groups = groups
        self.limits = {"max_num_seqs": 4, "max_num_batched_tokens": 12, **limits}
        self.requests, self.now = OpenRequests(), 0.0
        self.opened: list[OpenRequest] = []
        self.begin()

    def begin(self) -> None:
        self.scheduler = Scheduler(
            groups=self.groups, block_size=4, max_model_len=MAX_MODEL_LEN, **self.limits
        )
        self.runner = FakeRunner(self.groups, 4)
        self.in_flight: deque[Any] = deque()

    def add(self, new: NewRequest) -> None:
        validate(new, self.scheduler)
        self.opened.append(self.requests.open(OpenRequest(new, Nobody())))
        self.scheduler.add(new)

    def step(self) -> None:
        self.now += 1.0
        while len(self.in_flight) < self.scheduler.max_steps_in_flight:
            step = self.scheduler.schedule(self.now)
            if step is None:
                break
            self.in_flight.append((step, self.runner.launch(step)))
        if self.in_flight:
            step, pending = self.in_flight.popleft()
            self.requests.deliver(self.scheduler.commit(step, pending.result(), self.now + 0.5))
        self.scheduler.check()

    def die(self) -> None:
        """Lose the engine, with the steps in flight, and go on in a new one."""
        self.now += 0.5
        for own in self.requests:
            own.exposed = True
            own.lose_engine(self.now, died=True)
            self.requests.deliver(own.aborted_outputs(self.now))
        self.now += 10.0
        self.begin()
        for own in self.requests:
            new = own.continued()
            validate(new, self.scheduler)
            self.scheduler.add(new)
        self.scheduler.check()

    def finish(self) -> None:
        while self.requests:
            self.step()
        assert not self.scheduler.has_work

    def verify(self) -> None:
        """Compare all that was given with what each request gives alone."""
        received = Received(self.groups)
        for own in self.opened:
            received.take(own.outputs)
        for own in self.opened:
            for sequence in range(own.request.params.n):
                received.verify(own.request, sequence, MAX_MODEL_LEN)


def ask(name: str = "a", prompt: tuple[int, ...] = tuple(range(1, 10)), **params: Any) -> NewRequest:
    fields = {key: params.pop(key) for key in ("pooling", "grammar", "arrival_s") if key in params}
    params = {"max_tokens": 6, "seed": 1, "ignore_eos": True, **params}
    return NewRequest(name, prompt, SamplingParams(**params), **fields)


requests = st.lists(
    st.tuples(
        prompts,
        st.builds(
            make_params,
            n=st.sampled_from([1, 1, 2, 3]),
            max_tokens=st.one_of(st.none(), st.integers(1, 12)),
            min_tokens=st.sampled_from([0, 0, 3]),
            stop_token_ids=st.sampled_from([(), (5,), (3, 7)]),
            ignore_eos=st.booleans(),
            seed=st.integers(0, 1),
            prompt_logprobs=st.sampled_from([None, None, 0]),
        ),
        st.sampled_from(["", "", "", "g"]),
        st.sampled_from(["", "", "", "mean"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(
    groups=models,
    asked=requests,
    deaths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    aborted=st.integers(-1, 4),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 24),
    max_steps_in_flight=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    enable_prefix_caching=st.booleans(),
)
def test_every_request_gets_what_it_would_get_alone(
    groups: tuple[Group, ...],
    asked: list[tuple[list[int], SamplingParams, str, str]],
    deaths: list[int],
    aborted: int,
    **limits: Any,
):
    fleet = Fleet(groups, **limits)
    for number, (prompt, params, grammar, pooling) in enumerate(asked):
        extra = {"eos_token_ids": (1,), "grammar": grammar, "pooling": pooling}
        new = NewRequest(f"r{number}", tuple(prompt), params, fleet.now, **extra)  # type: ignore[arg-type]
        try:
            fleet.add(new)
        except RequestError:
            continue
    for num_steps in deaths:
        for _ in range(num_steps):
            fleet.step()
        if (own := fleet.requests.get(f"r{aborted}")) is not None:
            own.note_abort(1)
        fleet.die()
    fleet.finish()
    fleet.verify()


def test_tokens_and_times_of_a_sequence_that_three_engines_computed():
    fleet = Fleet((BlockGroup(40),), max_num_batched_tokens=20)
    fleet.add(ask(arrival_s=0.0))
    fleet.step()
    fleet.step()
    (own,) = fleet.opened
    first = own.sequences[0].metrics
    assert first is not None
    for _ in range(2):
        fleet.die()
        fleet.step()
        fleet.step()
    fleet.finish()
    fleet.verify()
    metrics = own.sequences[0].metrics
    assert metrics is not None
    assert (metrics.arrival_s, metrics.admitted_s, metrics.first_token_s) == (0.0, 1.0, 1.5)
    assert (metrics.num_continuations, metrics.num_preemptions) == (2, 0)
    assert metrics.preempted_s == 2 * 11.5  # from each death to the next token
    assert metrics.queue_s + metrics.prefill_s + metrics.decode_s + metrics.preempted_s == metrics.finished_s
    assert own.sequences[0].num_cached_tokens == 0
    assert {output.num_cached_tokens for output in own.outputs} == {0}


def test_what_was_given_is_not_computed_again():
    fleet = Fleet((BlockGroup(40),))
    fleet.add(ask(n=3, prompt_logprobs=0))
    while len(fleet.opened[0].outputs) < 7:
        fleet.step()
    before = [list(one.token_ids) for one in fleet.opened[0].sequences]
    assert all(before)
    fleet.die()
    new = fleet.opened[0].continued()
    assert new.resumed == tuple(map(tuple, before))
    assert new.params.prompt_logprobs is None
    fleet.runner.num_computed = 0
    fleet.finish()
    fleet.verify()
    # The prompt once but for its last block, what was emitted, and what followed.
    assert fleet.runner.num_computed == 8 + 3 * (1 + 6 - 1)


def test_one_that_has_begun_goes_before_the_queue():
    fleet = Fleet((BlockGroup(40),), max_num_seqs=1)
    fleet.add(ask("begun"))
    fleet.step()
    fleet.begin()
    own = fleet.requests.get("begun")
    assert own is not None
    fleet.scheduler.add(ask("waiting"))
    fleet.scheduler.add(own.continued())
    step = fleet.scheduler.schedule(1.0)
    assert step is not None
    assert [admission.request_id for admission in step.admitted] == ["begun"]


def test_the_tokens_before_count_for_lengths_and_stops():
    """`max_tokens` and `min_tokens` are those of the answer, not of the part that is left."""
    new = ask(max_tokens=5, min_tokens=4, stop_token_ids=list(range(20)))
    expected = solo(new, 0, MAX_MODEL_LEN, (BlockGroup(40),)).token_ids
    for cut in range(1, 4):
        fleet = Fleet((BlockGroup(40),))
        fleet.add(new)
        while len(fleet.opened[0].sequences[0].token_ids) < cut:
            fleet.step()
        fleet.die()
        fleet.finish()
        assert fleet.opened[0].sequences[0].token_ids == expected
        assert len(expected) == 5


def test_a_sequence_without_an_engine_is_ended_by_its_caller():
    fleet = Fleet((BlockGroup(40),))
    fleet.add(ask(n=2))
    fleet.step()
    (own,) = fleet.opened
    own.lose_engine(fleet.now, died=True)
    own.note_abort(1)
    fleet.requests.deliver(own.aborted_outputs(fleet.now))
    assert own.outputs[-1][:2] == ("a", 1)
    assert own.outputs[-1].finish_reason == "abort"
    assert own.continued().resumed[1] is None
    own.note_abort(None)
    fleet.requests.deliver(own.aborted_outputs(fleet.now))
    assert own.ended
    assert not fleet.requests


def test_deaths_count_until_a_token_comes():
    own = OpenRequest(ask(), Nobody())
    for expected, exposed in enumerate((True, True)):
        assert own.num_deaths == expected
        own.exposed = exposed
        own.lose_engine(0.0, died=True)
    own.lose_engine(0.0, died=True)  # it was not exposed to this one
    own.exposed = True
    own.lose_engine(0.0, died=False)
    assert own.num_deaths == 2
    own.deliver(Output("a", 0, (5,), metrics=RequestMetrics(0.0)))
    assert own.num_deaths == 0


def opened(*names: str) -> tuple[OpenRequests, list[OpenRequest]]:
    """Open requests that an engine computes."""
    requests = OpenRequests()
    found = [requests.open(OpenRequest(ask(name), Nobody(), sent=True, exposed=True)) for name in names]
    return requests, found


def test_only_what_engines_die_of_alone_kills_them():
    """However many engines die while several requests are computed, none of these is ended."""
    requests, found = opened("a", "b", "c")
    for _ in range(20):
        for own in found[:2]:
            own.sent = own.exposed = True
        requests.lose_engine(0.0)
        assert not any(own.kills for own in found)
    assert [own.is_suspect for own in found] == [True, True, False]
    for expected in (False, False, True):
        found[0].sent = found[0].exposed = True
        found[1].sent = True  # it waits in the engine
        requests.lose_engine(0.0)
        assert found[0].kills == expected
    assert not found[1].kills
    found[0].deliver(Output("a", 0, (5,), metrics=RequestMetrics(0.0)))
    assert not found[0].is_suspect
    assert not found[0].kills


def test_a_suspect_is_sent_alone_and_before_all_others():
    requests, found = opened("a", "b", "c", "d")
    for _ in range(2):
        for own in found[1:3]:
            own.exposed = True
        requests.lose_engine(0.0)
    assert requests.sendable() == [found[1]]
    found[1].sent = True
    assert requests.sendable() == []
    found[1].deliver(Output("b", 0, (5,), metrics=RequestMetrics(0.0)))
    assert requests.sendable() == [found[2]]
    assert requests.take("c") is found[2]
    assert requests.sendable() == [found[0], found[3]]


def test_suspects_stay_where_engines_died():
    requests, found = opened("a", "b")
    requests.lose_engine(0.0)
    found[1].sent = found[1].exposed = True
    requests.lose_engine(0.0)
    assert requests.take_unsuspected() == [found[0]]
    assert [*requests] == [found[1]]


def test_fingerprints_of_the_engines_that_gave_tokens():
    own = OpenRequest(ask(), Nobody())
    own.take_fingerprint("one")
    own.take_fingerprint("two")  # the first gave nothing
    assert own.fingerprint == "two"
    own.deliver(Output("a", 0, (5,)))
    for name in ("two", "three", "two"):
        own.take_fingerprint(name)
    assert own.fingerprint == "two+three"


@pytest.mark.parametrize(
    ("resumed", "fields", "problem"),
    [
        (((1,), (2,)), {}, "2 sequences are resumed, but the request has 1"),
        ((None,), {}, "all sequences"),
        (((1, 2, 3, 4, 5, 6),), {}, "reached its length"),
        (((1,) * 31,), {"max_tokens": None}, "reached its length"),
        (((1, 23),), {}, "token id 23"),
        (((-1,),), {}, "token id -1"),
        (((1,),), {"pooling": "mean"}, "pooling"),
    ],
)
def test_what_no_engine_can_have_left_is_refused(
    resumed: tuple[tuple[int, ...] | None, ...], fields: dict[str, Any], problem: str
):
    new = replace(ask(**fields), resumed=resumed)
    with pytest.raises(RequestError, match=problem):
        validate(new, Fleet((BlockGroup(40),)).scheduler, 23)
