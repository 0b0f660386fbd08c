"""Engines in this process, stepped by a thread of their own or by those who wait, over a fake device."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_runner import FakeRunner, Received

from quire.engine.caches import BlockGroup
from quire.engine.client import Stream
from quire.engine.engine import Engine, request_limits
from quire.engine.in_process import EngineThread, SharedEngine
from quire.engine.open_request import OpenRequest, OpenRequests
from quire.engine.scheduler import Scheduler
from quire.engine.status import Facts, StepReport
from quire.errors import EngineDead, RequestError
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output, Step, StepResult

LIMIT_S = 30.0  # no test waits longer for anything


class GuidedRunner(FakeRunner):
    """A fake device that calls `before` ahead of each step: it may wait there, or raise."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def compute(self, step: Step) -> StepResult:
        self.before()
        return super().compute(step)


def make_engine() -> Engine:
    scheduler = Scheduler(
        groups=[BlockGroup(64)],
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_steps_in_flight=2,
    )
    return Engine(scheduler, GuidedRunner(64, 4), vocab_size=100)


def facts_of(engine: Engine) -> Facts:
    return Facts({"isa": "none"}, request_limits(engine.scheduler, 100), 64)


def guide(engine: Engine, before: Callable[[], None]) -> None:
    assert isinstance(engine.runner, GuidedRunner)
    engine.runner.before = before  # type: ignore[method-assign]


class Gate:
    """Lets a device take so many steps and then holds it; one that is to fail does so at the next step."""

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self.steps = threading.Semaphore(num_steps)
        self.failure: Exception | None = None
        guide(engine, self.wait)

    def wait(self) -> None:
        assert self.steps.acquire(timeout=LIMIT_S)
        if self.failure is not None:
            raise self.failure

    def open(self) -> None:
        self.steps.release(10_000)


def ask(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> NewRequest:
    return NewRequest(name, prompt, SamplingParams(**{"ignore_eos": True, **params}))


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[EngineThread]:
    client = EngineThread(engine, facts_of(engine))
    try:
        yield client
    finally:
        await client.close()


async def follow(stream: Stream, num_sequences: int = 1) -> list[Output]:
    outputs: list[Output] = []
    while sum(output.finish_reason is not None for output in outputs) < num_sequences:
        outputs += await stream.get()
    return outputs


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def empty(engine: Engine) -> bool:
    """True when nothing runs or waits, and all blocks are free."""
    scheduler = engine.scheduler
    scheduler.check()
    return not (scheduler.num_running or scheduler.num_waiting) and scheduler.num_free_blocks == 64


def kernel_fails() -> None:
    raise ValueError("no such kernel")


# What is open


class Nobody:
    """Runs no request."""

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        raise AssertionError(request_id)

    def abort_later(self, own: OpenRequest) -> None:
        raise AssertionError(own.request.request_id)


def opened_in(
    requests: OpenRequests, name: str = "a", wake: Callable[[OpenRequest], None] | None = None, **params: Any
) -> OpenRequest:
    return requests.open(OpenRequest(ask(name, **params), Nobody(), wake))


def test_every_request_ends_once() -> None:
    requests, woken = OpenRequests(), list[tuple[str, Exception | None]]()
    wake = lambda own: woken.append((own.request.request_id, own.error))  # noqa: E731
    opened = {name: opened_in(requests, name, wake, n=2) for name in "abc"}
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        opened_in(requests, "a")
    requests.deliver([Output("a", 0, (5,)), Output("a", 0, (6,), finish_reason="length")])
    requests.deliver([Output("a", 1, (7,), finish_reason="length"), Output("unknown", 0, (1,))])
    requests.fail("b", RequestError("no"))
    requests.fail("b", RequestError("again"))
    requests.fail_all(EngineDead("gone"))
    requests.fail_all(EngineDead("again"))
    requests.deliver([Output(name, 0, (9,), finish_reason="length") for name in "abc"])
    assert [name for name, _ in woken] == ["a", "a", "a", "b", "c"]
    assert not requests
    assert all(own.ended and own.wake is None for own in opened.values())
    assert [output.token_ids for output in opened["a"].take()] == [(5,), (6,), (7,)]
    assert opened["a"].take() == []
    for name, message in (("b", "no"), ("c", "gone")):
        with pytest.raises((RequestError, EngineDead), match=message):
            opened[name].take()


def test_what_has_come_is_read_before_the_error() -> None:
    requests = OpenRequests()
    own = opened_in(requests)
    requests.deliver([Output("a", 0, (5,))])
    requests.fail_all(EngineDead("gone"))
    assert [output.token_ids for output in own.take()] == [(5,)]
    with pytest.raises(EngineDead, match="gone"):
        own.take()


def test_one_death_is_an_exception_for_each() -> None:
    requests = OpenRequests()
    first, second = opened_in(requests, "a"), opened_in(requests, "b")
    death = EngineDead("gone", "load it again", retry=False)
    death.__cause__ = ValueError("why")
    requests.fail_all(death)
    assert first.error is not second.error
    for error in (first.error, second.error):
        assert isinstance(error, EngineDead)
        assert (error.message, error.hint, error.retry) == ("gone", "load it again", False)
        assert error.__cause__ is death.__cause__


# Stepped by those who wait


class Reader:
    """What one thread reads of a SharedEngine."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.error: Exception | None = None

    def wake(self, own: OpenRequest) -> None:
        self.error = own.error
        if own.error is None:
            self.outputs += own.take()

    def waits(self) -> bool:
        return self.error is None and not any(output.finish_reason for output in self.outputs)


def test_a_step_serves_all_whoever_takes_it() -> None:
    engine, received, readers = make_engine(), Received(), [Reader(), Reader()]
    shared = SharedEngine(engine)
    asked = [ask("a"), ask("b", max_tokens=5)]
    streams = [shared.submit(one, reader.wake) for one, reader in zip(asked, readers, strict=True)]
    while readers[0].waits():
        shared.step(readers[0].waits)
    assert not readers[1].waits()
    num_steps = len(engine.records)
    shared.step(readers[1].waits)  # not wanted any more
    assert len(engine.records) == num_steps
    for one, reader in zip(asked, readers, strict=True):
        received.take(reader.outputs)
        received.verify(one, 0, 64)
    del streams


def test_a_dropped_request_is_aborted_even_in_the_middle_of_a_step() -> None:
    engine, reader = make_engine(), Reader()
    shared = SharedEngine(engine)
    dropped = [shared.submit(ask("dropped", max_tokens=None), Reader().wake)]
    guide(engine, dropped.clear)
    stream = shared.submit(ask("a", max_tokens=4), reader.wake)
    while reader.waits():
        shared.step(reader.waits)
    assert len(reader.outputs) == 4
    assert empty(engine)
    del stream


def test_a_request_with_an_id_in_use_leaves_nothing_behind() -> None:
    """Also where the engine has ended the one that has it, and its last output is on its way."""
    engine, reader = make_engine(), Reader()
    shared = SharedEngine(engine)
    stream = shared.submit(ask("a", max_tokens=None), reader.wake)
    shared.step(reader.waits)
    stream.abort()
    with pytest.raises(RequestError, match="in use"):
        shared.submit(ask("a", max_tokens=None), Reader().wake)
    shared.step(reader.waits)
    assert [output.finish_reason for output in reader.outputs][-1] == "abort"
    assert empty(engine)
    with pytest.raises(RequestError, match="token"):
        shared.submit(ask("b", (10**9,)), reader.wake)
    again = shared.submit(ask("b", max_tokens=1), (second := Reader()).wake)
    shared.step(second.waits)
    assert not second.waits()
    del again


def test_a_death_ends_the_requests_of_all_threads() -> None:
    engine, readers = make_engine(), [Reader(), Reader()]
    shared = SharedEngine(engine)
    streams = [shared.submit(ask(name), reader.wake) for name, reader in zip("ab", readers, strict=True)]
    shared.step(readers[0].waits)
    guide(engine, kernel_fails)
    shared.step(readers[0].waits)
    for reader in readers:
        assert not reader.waits()
        assert "ValueError: no such kernel" in str(reader.error)
        assert isinstance(reader.error, EngineDead)
        assert isinstance(reader.error.__cause__, ValueError)
    with pytest.raises(EngineDead, match="no such kernel"):
        shared.submit(ask("c"), Reader().wake)
    del streams


def test_an_interrupted_step_ends_the_requests_of_the_others_too() -> None:
    engine, readers = make_engine(), [Reader(), Reader()]
    shared = SharedEngine(engine)
    streams = [shared.submit(ask(name), reader.wake) for name, reader in zip("ab", readers, strict=True)]

    def interrupted() -> None:
        raise KeyboardInterrupt

    guide(engine, interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared.step(readers[0].waits)
    assert "KeyboardInterrupt" in str(readers[1].error)
    del streams


# Stepped by a thread of its own


def test_streams_give_what_the_engine_gives() -> None:
    engine, received = make_engine(), Received()
    asked = [ask("a"), ask("b", max_tokens=3, n=2, seed=1, temperature=1), ask("c", prompt=tuple(range(20)))]

    async def check() -> None:
        reports: list[StepReport] = []
        async with running(engine) as client:
            client.on_record = reports.append
            streams = [client.submit(one) for one in asked]
            assert client.status.has_work
            for one, stream in zip(asked, streams, strict=True):
                received.take(await follow(stream, one.params.n))
            await until(lambda: not client.status.has_work)
            assert client.status.facts.chosen == {"isa": "none"}
            assert client.status.steps == len(reports) >= len(engine.records)
            assert client.status.num_free_blocks == client.status.num_blocks == 64
            assert client.healthy(time.monotonic()) is None

    run(check())
    for one in asked:
        for sequence in range(one.params.n):
            received.verify(one, sequence, 64)
    assert empty(engine)


def test_an_idle_engine_is_viewed_when_it_is_asked() -> None:
    async def check() -> None:
        reports: list[StepReport] = []
        async with running(make_engine()) as client:
            client.on_record = reports.append
            await follow(client.submit(ask("a")), 1)
            await until(lambda: not client.status.has_work)
            reports.clear()
            client.watch(True)
            await until(lambda: reports)
            (report,) = reports
            assert report.record is None
            assert report.view is not None
            assert report.view.groups is not None

    run(check())


def test_the_loop_is_called_once_a_step_and_never_waits() -> None:
    engine = make_engine()
    gate = Gate(engine, 0)

    async def check() -> None:
        async with running(engine) as client:
            loop, calls = asyncio.get_running_loop(), list[Any]()
            call, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda *args: calls.append(args)  # type: ignore[assignment,method-assign]
            streams = [client.submit(ask(str(i), max_tokens=2)) for i in range(8)]
            await asyncio.sleep(0.01)  # the first step waits for this loop
            assert not engine.records
            gate.steps.release(2)
            await until(lambda: len(calls) >= 2 and not engine.has_work)
            assert len(engine.records) == len(calls)
            loop.call_soon_threadsafe = call  # type: ignore[method-assign]
            for args in calls:
                loop.call_soon(*args)
            assert [len(await follow(stream)) for stream in streams] == [2] * 8

    run(check())


def test_a_refusal_is_of_one_request_alone() -> None:
    async def check() -> None:
        async with running(make_engine()) as client:
            good = client.submit(ask("good"))
            with pytest.raises(RequestError, match="in use"):
                client.submit(ask("good"))
            with pytest.raises(RequestError, match="your prompt has 70 tokens"):
                await client.submit(ask("long", prompt=(1,) * 70)).get()
            assert len(await follow(good)) == 16
            assert len(await follow(client.submit(ask("long")))) == 16  # the name is free again

    run(check())


def test_aborted_and_dropped_streams_free_their_blocks() -> None:
    engine = make_engine()
    gate = Gate(engine, 3)

    async def check() -> None:
        async with running(engine) as client:
            streams = [client.submit(ask(str(i), max_tokens=None)) for i in range(3)]
            other = client.submit(ask("other", max_tokens=None))
            for stream in streams:
                await stream.get()
            streams[0].abort()
            waiting = asyncio.create_task(follow(client.submit(ask("waiting", max_tokens=None))))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            client.abort("other")
            client.abort("unknown")
            first = streams[0]
            del streams, stream, waiting
            gc.collect()
            gate.open()
            for aborted in (first, other):
                assert (await follow(aborted))[-1].finish_reason == "abort"
            await until(lambda: not client.status.has_work)
            assert empty(engine)
            assert len(engine.records) < 20  # and none ran to its end

    run(check())


def test_a_death_ends_every_stream_once() -> None:
    engine = make_engine()
    gate = Gate(engine, 2)

    async def check() -> None:
        async with running(engine) as client:
            streams = [client.submit(ask(str(i), max_tokens=None)) for i in range(4)]
            await streams[0].get()
            gate.failure = ValueError("no such kernel")
            gate.open()
            ends = await asyncio.gather(*map(follow, streams), return_exceptions=True)
            assert all(isinstance(end, EngineDead) and "no such kernel" in end.message for end in ends)
            assert len(set(map(id, ends))) == 4
            assert client.status.state == "stopped"
            assert not client.status.has_work
            assert "no such kernel" in str(client.healthy(time.monotonic()))
            with pytest.raises(EngineDead, match="no such kernel"):
                client.submit(ask("new"))

    run(check())


def test_close_ends_open_streams_and_takes_no_more() -> None:
    async def check() -> None:
        engine = make_engine()
        client = EngineThread(engine, facts_of(engine))
        stream = client.submit(ask(max_tokens=None))
        waiting = asyncio.create_task(follow(stream))
        await client.close()
        with pytest.raises(EngineDead, match="the engine was stopped"):
            await waiting
        with pytest.raises(EngineDead, match="the engine is stopped"):
            client.submit(ask("b"))
        assert client.healthy(time.monotonic()) == "the engine is stopped"
        await client.close()

    run(check())
    assert not [thread for thread in threading.enumerate() if thread.name == "quire-engine"]


def test_a_step_that_does_not_end_is_not_healthy() -> None:
    engine, go = make_engine(), threading.Event()
    guide(engine, lambda: None if go.wait(LIMIT_S) else kernel_fails())

    async def check() -> None:
        async with running(engine) as client:
            stream = client.submit(ask())
            assert client.healthy(time.monotonic()) is None
            assert client.healthy(time.monotonic() + 60) == "no step of the engine has ended for 60 s"
            go.set()
            await follow(stream)
            assert client.healthy(time.monotonic() + 60) is None

    run(check())


def test_one_event_loop_after_another() -> None:
    """What a loop that was closed left open is aborted; a loop that still runs keeps the engine."""
    engine = make_engine()
    gate = Gate(engine, 2)
    client = EngineThread(engine, facts_of(engine))
    left: list[Stream] = []

    async def leave() -> None:
        left.append(client.submit(ask("a", max_tokens=None)))
        await left[0].get()

    async def use() -> None:
        again = client.submit(ask("a"))
        gate.open()
        assert len(await follow(again)) == 16
        with pytest.raises(EngineDead, match="loop was closed"):
            await follow(left[0])
        await until(lambda: empty(engine))
        stream = client.submit(ask("b", max_tokens=None))
        held = Gate(engine, 0)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, leave())
        held.open()
        assert await follow(stream)
        await client.close()

    run(leave())
    run(use())
