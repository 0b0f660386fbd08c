"""The engine's process dies, stands still or sends nonsense: every stream ends, and the engine comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from faulty_engine import GARBAGE, HANG, KILL, RAISE, SLEEP
from remote_engines import (
    DEMO,
    LIMIT_S,
    NULL,
    QUICK,
    exists,
    faulty,
    follow,
    gist,
    local,
    num_files,
    request,
    run,
    running,
    until,
)

from quire.engine.client import Stream
from quire.errors import EngineDead
from quire.server.remote import RemoteEngine, RestartPolicy
from quire.types import Output

SLOW_BACK = replace(QUICK, first_delay_s=0.3, longest_delay_s=0.3)


def kill(engine: RemoteEngine, number: int = signal.SIGKILL) -> None:
    assert engine.status.pid is not None
    os.kill(engine.status.pid, number)


async def ending(stream: Stream) -> list[Output] | str:
    """The outputs of a stream, or the error that ended it. Raises TimeoutError for one that hangs."""
    try:
        return await follow(stream)
    except EngineDead as error:
        return error.message


async def ready(engine: RemoteEngine) -> None:
    await until(lambda: engine.healthy(time.monotonic()) is None)


def test_a_death_ends_nothing() -> None:
    """What has begun goes on after the last token that came; what waited is sent again."""
    config = replace(DEMO, max_num_seqs=4)
    sampled = {"max_tokens": 60, "temperature": 1, "logprobs": 2, "prompt_logprobs": 1}
    requests = [request(str(i), 3 + i, 4, **sampled, n=1 + i % 3) for i in range(12)]
    expected = local(config, requests)

    async def check() -> None:
        async with running(config, command=faulty(10), policy=SLOW_BACK) as engine:
            streams = [engine.submit(one) for one in requests]
            first = await streams[0].get()
            tasks = [
                asyncio.create_task(follow(stream, one.params.n))
                for one, stream in zip(requests, streams, strict=True)
            ]
            kill(engine)
            await until(lambda: engine.status.state == "restarting")
            assert engine.healthy(time.monotonic()) == "the engine is restarting"
            assert engine.status.num_running == 0
            with pytest.raises(EngineDead, match="restarting"):
                engine.submit(request("new"))
            found = await asyncio.gather(*tasks)
            found[0] = first + found[0]
            for one, outputs in zip(requests, found, strict=True):
                assert gist(outputs) == gist(expected[one.request_id])
            metrics = [outputs[-1].metrics for outputs in (found[0], found[-1])]
            assert [one and one.num_continuations for one in metrics] == [1, 0]
            assert metrics[0] is not None
            assert metrics[0].preempted_s > SLOW_BACK.first_delay_s
            assert first[0].metrics is not None
            assert metrics[0].first_token_s == first[0].metrics.first_token_s
            assert engine.status.num_restarts == 1
            assert engine.healthy(time.monotonic()) is None
            assert gist(await follow(engine.submit(requests[0]))) == gist(expected["0"])

    run(check())


def test_a_death_is_seen_at_once() -> None:
    async def check() -> None:
        async with running() as engine:
            kill(engine)
            assert await until(lambda: engine.healthy(time.monotonic())) < 0.5
            with pytest.raises(EngineDead):
                engine.submit(request("a"))
            await ready(engine)

    run(check())


def test_outputs_that_nobody_fetched_are_not_computed_again() -> None:
    config = replace(DEMO, speculative="off")  # a token a step
    expected = local(config, [request("a", max_tokens=8, temperature=1)])

    async def check() -> None:
        async with running(config, command=faulty(20)) as engine:
            stream = engine.submit(request("a", max_tokens=8, temperature=1))
            await until(lambda: engine.status.steps == 3)
            kill(engine)
            await until(lambda: engine.status.num_restarts == 1)
            assert gist(await follow(stream)) == gist(expected["a"])
            assert engine.status.steps == 8

    run(check())


def test_killed_over_and_over_no_stream_hangs() -> None:
    before = num_files()

    async def check() -> None:
        async with running(command=faulty(2)) as engine:
            ended = []
            for number in range(20):
                await until(lambda count=number: engine.status.num_restarts == count)
                await ready(engine)
                streams = [engine.submit(request(f"{number} {i}", 3, max_tokens=40)) for i in range(24)]
                tasks = [asyncio.create_task(follow(stream)) for stream in streams]
                steps = engine.status.steps
                await until(lambda before=steps: engine.status.steps > before)
                await asyncio.sleep(number * 0.006)
                kill(engine)
                ended += tasks
            endings = await asyncio.gather(*ended)
            lengths = [sum(len(output.token_ids) for output in one) for one in endings]
            assert lengths == [40] * 20 * 24
            await until(lambda: engine.status.num_restarts == 20)
            await ready(engine)
            assert not engine.status.has_work
            assert engine.status.num_free_blocks == engine.status.num_blocks

    run(check())
    assert num_files() <= before


def test_nothing_is_left_of_streams_that_come_and_go() -> None:
    """Fetched to the end, aborted, dropped or cancelled, at random, with a death in between."""
    random = Random(0)

    async def one(engine: RemoteEngine, name: int) -> None:
        await asyncio.sleep(random.random())
        try:
            stream = engine.submit(request(str(name), *range(3, 60), n=3, temperature=1, max_tokens=30))
            for _ in range(random.randrange(8)):
                await asyncio.wait_for(stream.get(), LIMIT_S)
            match random.randrange(4):
                case 0:
                    stream.abort(random.randrange(3))
                    await ending(stream)
                case 1:
                    stream.abort()
                case 2:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stream.get(), 0.001)
        except (EngineDead, RuntimeError):
            pass  # it died, or has ended

    async def check() -> None:
        async with running(command=faulty(2)) as engine:
            tasks = [asyncio.create_task(one(engine, name)) for name in range(200)]
            await asyncio.sleep(0.5)
            kill(engine)
            await asyncio.gather(*tasks)
            await until(lambda: not engine.status.has_work)
            await follow(engine.submit(request("last")))
            assert engine.status.num_running == engine.status.num_waiting == 0
            assert engine.status.num_free_blocks == engine.status.num_blocks

    run(check())


@pytest.mark.parametrize(
    ("token_id", "cause"),
    [
        (KILL, "the engine died: it was killed by signal 9 (Killed)"),
        (RAISE, "a step failed (ArithmeticError: a broken kernel)"),
        (GARBAGE, "the engine sent a frame of 1,213,486,160 bytes; at most 268,435,456 are read"),
    ],
    ids=["kill", "raise", "garbage"],
)
def test_a_request_that_kills_is_run_three_times_at_most(token_id: int, cause: str) -> None:
    async def check() -> None:
        async with running(command=faulty(5)) as engine:
            poison = engine.submit(request("poison", token_id))
            assert await ending(poison) == cause
            await ready(engine)
            assert engine.status.num_restarts == 3
            assert engine.status.num_bad_frames == (3 if token_id == GARBAGE else 0)
            assert len(await follow(engine.submit(request("good")))) == 16

    run(check())


def test_a_request_that_kills_takes_no_other_with_it() -> None:
    """It is found among others, and those that come while it is computed alone wait."""
    good = [request(str(number), 3 + number, temperature=1, max_tokens=60) for number in range(12)]
    expected = local(DEMO, good)

    async def check() -> None:
        async with running(DEMO, command=faulty(5)) as engine:
            streams = [engine.submit(one) for one in good[:6]]
            poison = engine.submit(request("poison", KILL))
            ended = asyncio.create_task(ending(poison))
            tasks = [asyncio.create_task(follow(stream)) for stream in streams]
            for least, one in zip((0, 1, 2, 3, 4, 5), good[6:], strict=True):
                await until(lambda least=least: engine.status.num_restarts >= least)
                await ready(engine)
                tasks.append(asyncio.create_task(follow(engine.submit(one))))
            assert await ended == "the engine died: it was killed by signal 9 (Killed)"
            for one, outputs in zip(good, await asyncio.gather(*tasks), strict=True):
                assert gist(outputs) == gist(expected[one.request_id])
            assert engine.status.num_restarts <= 6  # two with all, one beside those cleared, three alone

    run(check())


def test_no_request_ends_for_kills_from_outside() -> None:
    """Engines are killed before they give any token, until one stream lost four, two of them alone."""
    good = [request(str(number), 3 + number, temperature=1, max_tokens=4) for number in range(4)]
    expected = local(DEMO, good)

    async def check() -> None:
        async with running(DEMO, command=faulty(300)) as engine:
            streams = [engine.submit(one) for one in good]
            tasks = [asyncio.create_task(follow(stream)) for stream in streams]
            while max(own.num_deaths_alone for own in engine._requests) < 2:
                await until(lambda: any(own.sent and own.exposed for own in engine._requests))
                await asyncio.sleep(0.05)
                restarts = engine.status.num_restarts
                kill(engine)
                await until(lambda before=restarts: engine.status.num_restarts > before)
            assert max(own.num_deaths for own in engine._requests) >= 4
            for one, outputs in zip(good, await asyncio.gather(*tasks), strict=True):
                assert gist(outputs) == gist(expected[one.request_id])

    run(check())


def test_an_engine_that_keeps_dying_is_left_alone() -> None:
    policy = replace(QUICK, max_deaths=3)

    async def check() -> None:
        async with running(policy=policy, command=faulty(5)) as engine:
            for number in range(3):
                await ready(engine)
                stream = engine.submit(request(str(number)))
                pid = engine.status.pid
                kill(engine)
                if number < 2:
                    await follow(stream)
            with pytest.raises(
                EngineDead, match="not restarted after 3 deaths: the engine died: it was killed by signal 9"
            ):
                await stream.get()
            assert engine.status.state == "stopped"
            assert engine.healthy(time.monotonic()) == "the engine is stopped"
            assert not exists(pid or 0)
            with pytest.raises(EngineDead, match="stopped"):
                engine.submit(request("a"))

    run(check())


def test_restarts_wait_longer_and_longer() -> None:
    policy = RestartPolicy()
    assert [policy.delay_s(n) for n in (1, 2, 3, 5, 6, 100)] == [0.5, 1, 2, 8, 10, 10]


def test_an_aborted_stream_does_not_go_on() -> None:
    async def check() -> None:
        async with running(command=faulty(5), policy=SLOW_BACK) as engine:
            before = engine.submit(request("before", HANG))
            during = engine.submit(request("during", HANG))
            await asyncio.sleep(0.05)
            before.abort()
            kill(engine)
            await until(lambda: engine.status.state == "restarting")
            during.abort()
            for stream in (before, during):
                assert [output.finish_reason for output in await follow(stream)] == ["abort"]
            await ready(engine)
            assert not engine.status.has_work

    run(check())


def test_stop_while_restarting() -> None:
    async def check() -> None:
        async with running(command=faulty(5), policy=replace(QUICK, first_delay_s=9)) as engine:
            stream = engine.submit(request("a", HANG))
            kill(engine)
            await until(lambda: engine.status.state == "restarting")
            await engine.close()
            assert await ending(stream) == "the engine was stopped"

    run(check())


@pytest.mark.parametrize("stand_still", ["stopped", "in a step"])
def test_health_is_that_of_the_steps(stand_still: str) -> None:
    """An engine that stands still is not healthy though its process is there, and healthy when it goes on."""

    async def check() -> None:
        async with running(command=faulty(5), policy=replace(QUICK, stall_s=0.2)) as engine:
            await asyncio.sleep(0.4)
            assert engine.healthy(time.monotonic()) is None  # idle
            prompt = 3 if stand_still == "stopped" else SLEEP
            stream = engine.submit(request("a", prompt))
            if stand_still == "stopped":
                kill(engine, signal.SIGSTOP)
            assert await until(lambda: engine.healthy(time.monotonic())) > 0.1
            assert "no step of the engine has ended" in str(engine.healthy(time.monotonic()))
            if stand_still == "stopped":
                kill(engine, signal.SIGCONT)
            assert len(await follow(stream)) == 16
            assert engine.healthy(time.monotonic()) is None
            assert engine.status.num_restarts == 0

    run(check())


@pytest.mark.parametrize("number", [None, signal.SIGSTOP], ids=["looping", "stopped"])
def test_an_engine_that_hangs_is_replaced(number: int | None) -> None:
    async def check() -> None:
        async with running(command=faulty(5), policy=replace(QUICK, hang_s=0.4)) as engine:
            stream = engine.submit(request("a", HANG if number is None else 3))
            if number is not None:
                kill(engine, number)
            ended = await ending(stream)
            await ready(engine)
            if number is None:
                assert ended == "no step of the engine ended for 0.4 s"
            assert engine.status.num_restarts == (3 if number is None else 1)

    run(check())


def test_a_long_run_is_no_hang() -> None:
    async def check() -> None:
        async with running(command=faulty(20), policy=replace(QUICK, stall_s=1, hang_s=1)) as engine:
            stream = engine.submit(request("a", max_tokens=100))
            while engine.status.has_work:
                await stream.get()
                assert engine.healthy(time.monotonic()) is None
            assert engine.status.num_restarts == 0

    run(check())


def test_a_server_that_stands_still_loses_nothing() -> None:
    """Much comes while the event loop is held up; nothing is lost, and nothing taken for a hang."""

    async def check() -> None:
        async with running(command=faulty(0), policy=replace(QUICK, hang_s=0.5)) as engine:
            streams = [engine.submit(request(str(i), 3, max_tokens=400, logprobs=20)) for i in range(16)]
            time.sleep(1)
            for stream in streams:
                outputs = await follow(stream)
                assert sum(len(output.logprobs) for output in outputs) == 400
            assert engine.status.num_restarts == 0

    run(check())


def test_a_failure_of_the_supervisor_ends_every_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with running(NULL, command=faulty(5)) as engine:
            stream = engine.submit(request("a", max_tokens=100))
            monkeypatch.setattr(engine, "_lose_requests", lambda cause: 1 // 0)
            kill(engine)
            assert await ending(stream) == "the engine is no longer supervised"
            assert engine.status.state == "stopped"

    run(check())
    assert "ZeroDivisionError" in caplog.text
