"""The engine in its own process gives what it gives in this one, takes aborts, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_engine import HANG, KILL
from remote_engines import (
    DEMO,
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
    runs,
    until,
)

from quire.config import EngineConfig
from quire.engine.open_request import OpenRequest
from quire.engine.request import prompt_hashes
from quire.engine.status import CacheChanges, StepReport
from quire.engine.view import View
from quire.errors import ConfigError, EngineDead, RequestError
from quire.server import engine_messages as messages
from quire.server.remote import RemoteEngine

REQUESTS = [
    request("greedy", *range(3, 90), max_tokens=20),
    request("logprobs", 9, 8, 7, logprobs=5, prompt_logprobs=3, temperature=1, seed=-(2**63)),
    request("seed", 9, 8, 7, logprobs=0, temperature=1.5, top_p=0.9, seed=2**63 - 1),
    request("sequences", 4, 5, n=3, temperature=1, logprobs=1),
    request("bias", 4, 5, logit_bias={10: 3.25, 11: -100}, presence_penalty=0.1, repetition_penalty=1.3),
    request("allowed", 4, 5, allowed_token_ids=[20, 21, 22], bad_words_token_ids=[[20, 21], [22]], seed=3),
    request("stop", 4, 5, temperature=1, stop_token_ids=list(range(0, 400, 2)), min_tokens=2),
    request("all", 4, 5, logprobs=-1, max_tokens=2),
]


def test_outputs_are_those_of_the_engine_in_this_process() -> None:
    expected = local(DEMO, REQUESTS)

    async def check() -> None:
        async with running(DEMO) as engine:
            streams = [engine.submit(one) for one in REQUESTS]
            for one, stream in zip(REQUESTS, streams, strict=True):
                outputs = await follow(stream, one.params.n)
                assert gist(outputs) == gist(expected[one.request_id]), one.request_id
                final = outputs[-1].metrics
                assert final is not None
                assert final.arrival_s == one.arrival_s

    run(check())


def test_status_follows_the_engine() -> None:
    async def check() -> None:
        reports: list[StepReport] = []
        async with running(replace(DEMO, speculative="off")) as engine:
            status = engine.status
            assert (status.state, status.steps, status.has_work) == ("ready", 0, False)
            assert status.facts.chosen["model"] == "demo"
            assert status.num_free_blocks == status.num_blocks > 0
            assert (status.facts.limits.max_model_len, status.facts.longest_context) == (512, 512)
            assert status.pid is not None
            assert Path(f"/proc/{status.pid}/comm").read_text().strip() == "quire-engine"
            engine.on_record = reports.append
            stream = engine.submit(request("a", 3, 4, 5))
            assert status.has_work
            await follow(stream)
            assert not status.has_work
            assert status.steps == len(reports) == 16
            records = [report.record for report in reports if report.record is not None]
            assert status.totals.num_tokens == sum(record.num_tokens for record in records) == 3 + 15
            assert status.totals.seconds == sum(record.seconds for record in records) > 0
            assert list(status.records) == records
            waited_s = sum(record.wall_s for record in records)
            assert sum(status.totals.bound_s.values()) == pytest.approx(waited_s) != 0
            assert (reports[0].num_running, reports[-1].num_running) == (1, 0)
            assert engine.healthy(time.monotonic()) is None
        assert engine.healthy(time.monotonic()) == "the engine is stopped"

    run(check())


def test_views_come_while_they_are_asked_for() -> None:
    """From an idle engine at once, and from the next one after a death."""

    async def check() -> None:
        reports: list[StepReport] = []

        def views() -> list[View]:
            return [report.view for report in reports if report.view is not None]

        async with running(command=faulty(5)) as engine:
            engine.on_record = reports.append
            await follow(engine.submit(request("a")))
            assert views() == []
            engine.watch(True)
            await until(views)
            assert views()[0].groups is not None
            deadly = engine.submit(request("b", KILL))
            with pytest.raises(EngineDead):
                await follow(deadly)
            reports.clear()
            await until(views)
            await follow(engine.submit(request("c")))
            await until(lambda: sum(len(view.steps) for view in views()) == 16)
            engine.watch(False)
            reports.clear()
            await follow(engine.submit(request("d")))
            assert views() == []

    run(check())


def test_what_is_cached_is_told_whole_by_each_process() -> None:
    async def check() -> None:
        told: list[CacheChanges] = []

        def take(report: StepReport) -> None:
            if report.cache is not None:
                told.append(report.cache)

        async with running(command=faulty(5)) as engine:
            engine.on_record = take
            await follow(engine.submit(request("a", *range(40))))
            assert told == []
            engine.follow_cache(True)
            await until(lambda: told)
            stored = told[0].stored
            hashes = prompt_hashes(request("a", *range(40)), engine.status.facts.limits.block_size)
            assert told[0].whole
            assert {one[:8] for one in hashes} <= {stored[i : i + 8] for i in range(0, len(stored), 8)}
            with pytest.raises(EngineDead):
                await follow(engine.submit(request("b", KILL)))
            told.clear()
            await until(lambda: CacheChanges(b"", b"", whole=True) in told)
            engine.follow_cache(False)
            told.clear()
            await follow(engine.submit(request("c", *range(40, 80))))
            assert told == []

    run(check())


def test_who_counts_does_not_end_who_computes(caplog: pytest.LogCaptureFixture) -> None:
    def count(report: StepReport) -> None:
        raise KeyError("a metric that is not there")

    async def check() -> None:
        async with running() as engine:
            engine.on_record = count
            assert len(await follow(engine.submit(request("a")))) == 16

    run(check())
    assert "KeyError" in caplog.text


def test_a_refusal_is_of_one_request_alone() -> None:
    smuggled = request("smuggled")
    object.__setattr__(smuggled.params, "temperature", 99.0)
    long = request("long", *([3] * 600))

    async def check() -> None:
        async with running(command=faulty(20)) as engine:  # so that the good one is not over too soon
            good = engine.submit(request("good"))
            for one, param in ((long, "prompt"), (smuggled, "temperature")):
                stream = engine.submit(one)
                with pytest.raises(RequestError) as refused:
                    await follow(stream)
                assert refused.value.param == param
            with pytest.raises(RequestError, match="in use"):
                engine.submit(request("good"))
            assert len(await follow(good)) == 16
            assert len(await follow(engine.submit(request("long")))) == 16  # the name is free again
            assert not engine.status.has_work

    run(check())


def test_an_abort_frees_at_once() -> None:
    async def check() -> None:
        async with running(command=faulty(20)) as engine:
            streams = [engine.submit(request(str(i), *range(3, 200), max_tokens=300)) for i in range(4)]
            await asyncio.gather(*(stream.get() for stream in streams))
            assert engine.status.num_running == 4
            for stream in streams:
                stream.abort()
            assert await until(lambda: engine.status.num_running == 0) < 1
            assert engine.status.num_free_blocks == engine.status.num_blocks
            for stream in streams:
                assert (await follow(stream))[-1].finish_reason == "abort"
                with pytest.raises(RuntimeError, match="has ended"):
                    await stream.get()
                stream.abort()  # of what has ended: nothing
            assert not engine.status.has_work

    run(check())


def test_one_sequence_is_aborted() -> None:
    async def check() -> None:
        async with running(command=faulty(5)) as engine:
            stream = engine.submit(request("a", n=3, temperature=1, max_tokens=40))
            first = await stream.get()
            stream.abort(1)
            ends = {o.sequence: o.finish_reason for o in await follow(stream, 3) if o.finish_reason}
            assert first[0].finish_reason is None
            assert ends == {0: "length", 1: "abort", 2: "length"}

    run(check())


def test_a_dropped_stream_is_aborted() -> None:
    async def check() -> None:
        async with running(command=faulty(20)) as engine:
            stream = engine.submit(request("a", max_tokens=400))
            await stream.get()
            waiting = asyncio.create_task(engine.submit(request("b", max_tokens=400)).get())
            await asyncio.sleep(0)
            waiting.cancel()
            del stream, waiting
            gc.collect()
            assert await until(lambda: engine.status.num_running == 0) < 1
            assert not engine.status.has_work

    run(check())


def test_many_streams_at_once() -> None:
    async def check() -> None:
        async with running() as engine:
            requests = [request(str(i), *range(3, 5 + i), max_tokens=2 + i % 30) for i in range(300)]
            outputs = await asyncio.gather(*(follow(engine.submit(one)) for one in requests))
            lengths = [sum(len(output.token_ids) for output in own) for own in outputs]
            assert lengths == [2 + i % 30 for i in range(300)]

    run(check())


def test_what_cannot_be_loaded_is_a_config_error() -> None:
    before = num_files()

    async def check() -> None:
        engine = RemoteEngine(EngineConfig(model="/nowhere"))
        with pytest.raises(ConfigError, match="no such folder") as error:
            await engine.start()
        assert error.value.hint is not None
        assert engine.status.state == "stopped"
        with pytest.raises(EngineDead):
            engine.submit(request("a"))
        await engine.close()

    run(check())
    assert num_files() <= before


def test_a_program_that_is_no_engine() -> None:
    async def check() -> None:
        engine = RemoteEngine(NULL, command=(sys.executable, "-c", "raise SystemExit(3)"))
        with pytest.raises(EngineDead, match="status 3"):
            await engine.start()
        with pytest.raises(EngineDead, match="could not be started"):
            await RemoteEngine(NULL, command=("/nowhere/python",)).start()

    run(check())


@pytest.mark.parametrize("prompt", [(3,), (HANG,)], ids=["running", "hanging"])
def test_stop_leaves_nothing(prompt: tuple[int, ...]) -> None:
    before = num_files()

    async def check() -> None:
        async with running(command=faulty(20)) as engine:
            pid = engine.status.pid
            assert pid is not None
            stream = engine.submit(request("a", *prompt, max_tokens=400))
            waiting = asyncio.create_task(follow(stream))
            await asyncio.sleep(0.1)
            begin_s = time.monotonic()
            await engine.close()
            assert time.monotonic() - begin_s < QUICK.stop_s + 1
            assert not exists(pid)
            with pytest.raises(EngineDead, match="stopped"):
                await waiting

    run(check())
    assert num_files() <= before


def test_a_start_that_is_given_up_leaves_nothing() -> None:
    before = num_files()

    async def check() -> None:
        engine = RemoteEngine(NULL)
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.status.pid)
        start.cancel()
        await asyncio.wait((start,))
        assert start.cancelled()
        assert not exists(engine.status.pid or 0)

    run(check())
    assert num_files() <= before


def test_an_engine_keeps_to_its_processors_and_its_memory() -> None:
    """All threads of its process, those of libraries too; this process runs where it ran before."""
    allowed = os.sched_getaffinity(0)
    last = max(allowed)

    async def check() -> None:
        async with running(DEMO, processors=(last,), available_bytes=1 << 30) as engine:
            assert engine.status.pid is not None
            for thread in os.listdir(f"/proc/{engine.status.pid}/task"):
                assert os.sched_getaffinity(int(thread)) == {last}
            assert engine.status.facts.chosen["num_threads"] == "1"
        with pytest.raises(ConfigError, match=r"10\.5 MB of memory are available"):
            async with running(DEMO, available_bytes=10 << 20):
                pass

    run(check())
    assert os.sched_getaffinity(0) == allowed


def test_an_engine_that_becomes_ready_when_it_is_closed_takes_no_request() -> None:
    async def check() -> None:
        async with running(NULL) as engine:
            facts = engine.status.facts
        engine._receive(messages.Ready(facts))  # it was on its way
        assert engine.status.state == "stopped"
        with pytest.raises(EngineDead):
            engine.adopt(OpenRequest(request("a"), engine))

    run(check())


def test_signals_are_for_the_server() -> None:
    async def check() -> None:
        async with running(command=faulty(10)) as engine:
            stream = engine.submit(request("a", max_tokens=30))
            await stream.get()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine.status.pid or 0, number)
            assert (await follow(stream))[-1].finish_reason == "length"

    run(check())


OWNER = """
import asyncio, sys
sys.path.insert(0, sys.argv.pop())
from quire.server.remote import RemoteEngine
from remote_engines import NULL, faulty, request

async def main():
    engine = RemoteEngine(NULL, command=faulty(5))
    await engine.start()
    stream = engine.submit(request("a", int(sys.argv[1])))
    await asyncio.sleep(0.1)
    print(engine.status.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("prompt", [3, HANG], ids=["idle", "in a step"])
def test_the_engine_ends_with_its_server(prompt: int) -> None:
    command = [sys.executable, "-c", OWNER, str(prompt), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert runs(pid)
        owner.kill()
    run(_gone(pid))


async def _gone(pid: int) -> None:
    assert await until(lambda: not runs(pid)) < 1


def test_one_task_follows_a_stream() -> None:
    async def check() -> None:
        async with running(command=faulty(20)) as engine:
            stream = engine.submit(request("a"))
            waiting = asyncio.create_task(follow(stream))
            await asyncio.sleep(0.005)
            with pytest.raises(RuntimeError, match="another task"):
                await stream.get()
            await waiting

    run(check())


def test_requests_come_in_while_a_step_runs() -> None:
    """What is sent in the middle of a step is in the next one."""

    async def check() -> None:
        async with running(command=faulty(50)) as engine:
            first = engine.submit(request("a"))
            await first.get()
            before = engine.status.steps
            await follow(engine.submit(request("b", max_tokens=1)))
            assert engine.status.steps <= before + 2

    run(check())
