"""The engine around the scheduler: what it refuses, delivers, records, and how it dies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_runner import FakeRunner, Received

from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine, step
from quire.engine.meter import Verdict
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.errors import EngineDead, RequestError
from quire.program.features import LEADING
from quire.sampling_params import SamplingParams
from quire.types import NewRequest

LAW = StepLaw(LEADING, (), (0.1, 0.0, 0.0, 0.0), ())


class Clock:
    """Seconds that pass by one at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FailingRunner(FakeRunner):
    failure: BaseException | None = None

    def launch(self, step):
        if self.failure is not None:
            raise self.failure
        return super().launch(step)


def make_engine(num_blocks=16, max_model_len=32, max_steps_in_flight=1, **options) -> Engine:
    scheduler = Scheduler(
        groups=[BlockGroup(num_blocks)],
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=max_model_len,
        max_steps_in_flight=max_steps_in_flight,
    )
    return Engine(scheduler, FailingRunner(num_blocks, 4), clock=Clock(), **options)


def ask(name="a", prompt=(1, 2, 3), **params) -> NewRequest:
    return NewRequest(name, tuple(prompt), SamplingParams(**params))


@pytest.mark.parametrize(
    ("request_", "message", "param"),
    [
        (ask(prompt=()), "the prompt is empty", "prompt"),
        (ask(prompt=[1] * 32), "your prompt has 32 tokens", "prompt"),
        (ask(prompt=[5, 100]), "token id 100 is not in the vocabulary", "prompt"),
        (ask(prompt=[-1]), "token id -1 is not in the vocabulary", "prompt"),
        (ask(name="open"), "'open' is in use", "request_id"),
        (replace(ask(prompt=()), pooling="embed"), "the input is empty", "input"),
        (replace(ask(prompt=[100]), pooling="embed"), "token id 100 is not in the vocabulary", "input"),
    ],
)
def test_what_can_never_run_is_refused(request_, message, param):
    engine = make_engine(vocab_size=100)
    engine.add(ask("open"))
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(request_)
    assert caught.value.param == param
    assert engine.scheduler.num_waiting == 1


def test_an_over_long_prompt_says_lengths_and_what_to_do():
    with pytest.raises(RequestError) as caught:
        make_engine().add(ask(prompt=[1] * 40))
    assert str(caught.value) == (
        "This model's maximum context length is 32 tokens. However, your prompt has 40 tokens. "
        "Please reduce the length of the prompt."
    )
    assert caught.value.code == "context_length_exceeded"


def test_what_exceeds_the_whole_cache_is_refused_and_what_fills_it_runs():
    engine = make_engine(num_blocks=4)
    with pytest.raises(RequestError, match=r"room for 16 tokens\. However, you requested 18") as caught:
        engine.add(ask(prompt=[1] * 10, max_tokens=8))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError) as caught:
        engine.add(ask(prompt=[1] * 20, max_tokens=1))
    assert caught.value.param == "prompt"
    engine.add(ask(prompt=[1] * 10, max_tokens=7, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_requests_run_to_their_end():
    engine, received = make_engine(), Received()
    requests = [ask("a"), ask("b", max_tokens=3, n=2), ask("c", prompt=range(20))]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        received.take(engine.step())
    for request in requests:
        for sequence in range(request.params.n):
            received.verify(request, sequence, 32)
    assert engine.step() == []


def test_the_outputs_of_an_abort_come_with_the_next_step():
    engine = make_engine()
    engine.add(ask("a", n=2))
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    assert engine.has_work
    outputs = engine.step()
    assert [(out.sequence, out.finish_reason) for out in outputs] == [(0, "abort"), (1, "abort")]
    assert not engine.has_work
    engine.add(ask("a"))  # the id is free again


def test_every_step_leaves_a_record():
    engine = make_engine(num_records=3)
    engine.add(ask("a", prompt=range(9), max_tokens=1))
    engine.step()
    engine.add(ask("b", prompt=range(9), max_tokens=4, ignore_eos=True))
    engine.add(ask("c", prompt=[7] * 20))
    engine.step()
    first, second = engine.records
    assert (first.index, first.num_rows, first.num_tokens, first.num_cached_tokens) == (0, 1, 9, 0)
    assert (second.index, second.num_rows, second.num_tokens, second.num_cached_tokens) == (1, 2, 16, 8)
    assert second.num_free_blocks == 16 - 3 - 5
    assert second.num_waiting == 0
    assert second.seconds == 2.0  # three looks at the clock
    while engine.has_work:
        engine.step()
    assert len(engine.records) == 3


class CountingMeter:
    """A meter with a new law after the second step, and no verdicts."""

    num_steps = 0
    draft_law = None

    def judge(self, step, times):
        self.num_steps += 1
        return Verdict()

    def new_law(self):
        return LAW if self.num_steps == 2 else None


def test_a_new_law_is_reported_with_the_step_that_it_comes_with():
    engine = make_engine(meter=CountingMeter())
    engine.add(ask("a", max_tokens=4, ignore_eos=True))
    reports = [step(engine)[1] for _ in range(4)]
    assert [report.law for report in reports] == [None, LAW, None, None]
    assert engine.scheduler.law is LAW


def test_a_failure_of_the_runner_kills_the_engine():
    engine = make_engine()
    engine.add(ask("a"))
    engine.runner.failure = ValueError("no such kernel")
    with pytest.raises(EngineDead, match="ValueError: no such kernel") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, ValueError)
    assert not engine.has_work
    engine.abort("a")
    for call in (engine.step, lambda: engine.add(ask("b"))):
        with pytest.raises(EngineDead, match="no such kernel"):
            call()


def test_an_interrupt_passes_through_and_kills_too():
    engine = make_engine()
    engine.add(ask("a"))
    engine.runner.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDead):
        engine.step()
