"""Replicas that are reached by calls: outputs of one engine, whichever replicas run a request or are lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from faulty_engine import KILL
from remote_engines import DEMO, LIMIT_S, NULL, faulty, follow, gist, local, request, run, running, until
from replica_engines import LAW

from quire.cluster import engine_calls
from quire.cluster.autoscaling import INTERVAL_S, Autoscaler
from quire.cluster.called_replicas import CalledReplicas
from quire.cluster.calls import given
from quire.cluster.engine_calls import EngineCalls
from quire.config import EngineConfig
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, RequestError
from quire.routing.goal_scaler import LatencyGoal
from quire.routing.prefix_router import PrefixRouter
from quire.server.remote import RemoteEngine

REQUESTS = [
    request("greedy", *range(3, 90), max_tokens=40),
    request("logprobs", 9, 8, 7, logprobs=5, prompt_logprobs=3, temperature=1, max_tokens=60),
    request("sequences", 4, 5, n=3, temperature=1, logprobs=1, max_tokens=60),
    request("seed", 9, 8, 7, temperature=1.5, top_p=0.9, seed=2**63 - 1, max_tokens=60),
]


async def unless_aborted(replicas: CalledReplicas, request_id: str) -> None:
    """Wait until the abort of a request has reached its replica."""
    own = replicas._requests.get(request_id)
    assert own is not None
    await until(lambda: any(one.aborted for one in own.sequences))
    await asyncio.sleep(0.01)


class LocalCalls:
    """Calls of engines in this process. Of those that are `lost`, calls and answers raise."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineCalls] = {}
        self.replicas: CalledReplicas | None = None
        self.host = ""  # where callers say they are, if not here
        self.lost: set[str] = set()
        self.late: set[str] = set()  # requests that reach their replica after their aborts
        self.garbled = ""  # the replica whose next news is no message
        self.wanted = 0  # as the last poll told

    async def generate(
        self, request_id: str, call: bytes, host: str, sent_s: float
    ) -> AsyncGenerator[bytes, None]:
        assert self.replicas is not None
        while (name := self.replicas.choose(request_id, set(self.engines) - self.lost)) is None:
            await asyncio.sleep(0.01)
        self.replicas.sent(request_id, name)
        if given(request_id) in self.late:
            await unless_aborted(self.replicas, given(request_id))
        async for frame in self.engines[name].generate(call, self.host or host, sent_s):
            self._check(name)
            yield frame

    async def abort(self, replica: str, request_id: str, sequence: int | None) -> None:
        self._check(replica)
        self.engines[replica].abort(request_id, sequence)

    async def poll(self, replica: str, name: str, watches: bool, ready: bool, wanted: int) -> bytes:
        self._check(replica)
        self.wanted = wanted
        if self.garbled == replica:
            self.garbled = ""
            return b"\x00\x00\x00\x01\xff"
        return await self.engines[replica].poll(name, watches, ready)

    def _check(self, name: str) -> None:
        if name in self.lost:
            raise ConnectionError(f"{name} is lost")


@asynccontextmanager
async def called(
    num_replicas: int = 2,
    config: EngineConfig = NULL,
    command: tuple[str, ...] | None = None,
    autoscaler: Autoscaler | None = None,
    patience_s: float = LIMIT_S,
) -> AsyncIterator[tuple[CalledReplicas, LocalCalls, dict[str, RemoteEngine]]]:
    """A client of that many engines, all of them ready; how it calls them, and the engines."""
    calls, engines = LocalCalls(), dict[str, RemoteEngine]()
    async with AsyncExitStack() as stack:
        for number in range(num_replicas):
            options = {} if command is None else {"command": command}
            engines[f"r{number}"] = engine = await stack.enter_async_context(running(config, **options))
            calls.engines[f"r{number}"] = EngineCalls(engine)
        replicas = calls.replicas = CalledReplicas(calls, PrefixRouter(config), autoscaler, patience_s)
        replicas.set_present([*engines])
        await replicas.start()
        await until(lambda: all(one.state == "ready" for one in replicas.statuses.values()))
        assert [*replicas.statuses] == [*range(num_replicas)]
        yield replicas, calls, engines
        await replicas.close()


def is_ready(replicas: CalledReplicas) -> bool:
    return any(card.health == "ready" for card in replicas.shown())


async def check_all(replicas: CalledReplicas) -> None:
    """Run REQUESTS together; their outputs are those of one engine."""
    expected = local(DEMO, REQUESTS)
    streams = [replicas.submit(one) for one in REQUESTS]
    for one, stream in zip(REQUESTS, streams, strict=True):
        outputs = await follow(stream, one.params.n)
        assert gist(outputs) == gist(expected[one.request_id]), one.request_id
        assert {output.request_id for output in outputs} == {one.request_id}
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.arrival_s == one.arrival_s


def test_outputs_are_those_of_one_engine_and_both_replicas_work() -> None:
    async def check() -> None:
        reports: list[StepReport] = []
        async with called(config=DEMO) as (replicas, _, engines):
            replicas.on_record = reports.append
            await check_all(replicas)
            assert all(engine.status.steps for engine in engines.values())
            await until(lambda: {report.replica for report in reports} == {0, 1})
            assert sum(report.record is not None for report in reports) <= replicas.status.steps

    run(check())


def test_news_that_is_no_message_is_forgotten() -> None:
    """It was read again before each later one, so that the replica was never ready any more."""

    async def check() -> None:
        async with called(config=DEMO) as (replicas, calls, _):
            calls.garbled = "r1"
            await until(lambda: replicas.statuses[1].state == "restarting")
            await until(lambda: replicas.statuses[1].state == "ready")
            await check_all(replicas)

    run(check())


def test_requests_of_a_replica_that_is_lost_go_on_elsewhere() -> None:
    async def check() -> None:
        async with called(config=DEMO) as (replicas, calls, engines):
            streams = [replicas.submit(one) for one in REQUESTS]
            await until(lambda: engines["r1"].status.steps > 5)
            calls.lost.add("r1")  # its calls fail at once; the deployment tells later that it is gone
            expected = local(DEMO, REQUESTS)
            for one, stream in zip(REQUESTS, streams, strict=True):
                outputs = await follow(stream, one.params.n)
                assert gist(outputs) == gist(expected[one.request_id]), one.request_id
            replicas.set_present(["r0"])
            assert [*replicas.statuses] == [0]
            await check_all(replicas)

    run(check())


def test_requests_of_an_engine_that_is_killed_go_on() -> None:
    async def check() -> None:
        async with called(config=DEMO) as (replicas, _, engines):
            streams = [replicas.submit(one) for one in REQUESTS]
            await until(lambda: engines["r0"].status.steps > 5)
            os.kill(engines["r0"].status.pid or 0, signal.SIGKILL)
            expected = local(DEMO, REQUESTS)
            for one, stream in zip(REQUESTS, streams, strict=True):
                outputs = await follow(stream, one.params.n)
                assert gist(outputs) == gist(expected[one.request_id]), one.request_id
            await until(lambda: all(one.state == "ready" for one in replicas.statuses.values()))
            await check_all(replicas)

    run(check())


def test_nothing_runs_in_a_replica_that_is_gone() -> None:
    async def check() -> None:
        async with called(command=faulty()) as (replicas, calls, _):
            stream = replicas.submit(request("a", max_tokens=100))
            await until(lambda: replicas.status.num_running == 1)
            assert replicas.status.num_free_blocks < replicas.status.num_blocks
            gone = f"r{stream.replica}"
            calls.lost.add(gone)
            replicas.set_present([*{"r0", "r1"} - {gone}])
            assert replicas.status.num_running == 0
            assert replicas.status.num_free_blocks == replicas.status.num_blocks

    run(check())


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new() -> None:
    async def check() -> None:
        async with called(command=faulty()) as (replicas, _, engines):
            streams = [replicas.submit(request(str(n), max_tokens=60)) for n in range(4)]
            await until(lambda: all(engine.status.num_running for engine in engines.values()))
            replicas.set_present(["r0"])
            streams += [replicas.submit(request(f"late {n}", max_tokens=5)) for n in range(3)]
            assert [len(await follow(stream)) > 0 for stream in streams] == [True] * 7
            assert {stream.replica for stream in streams[4:]} == {0}
            assert engines["r1"].status.num_restarts == 0

    run(check())


def test_requests_wait_while_all_replicas_are_replaced() -> None:
    async def check() -> None:
        async with called(config=DEMO) as (replicas, _, _):
            replicas.set_present([])
            assert replicas.healthy(time.monotonic()) is None
            streams = [replicas.submit(one) for one in REQUESTS]
            replicas.set_present(["r1"])  # not ready before it is asked
            expected = local(DEMO, REQUESTS)
            for one, stream in zip(REQUESTS, streams, strict=True):
                assert gist(await follow(stream, one.params.n)) == gist(expected[one.request_id])

    run(check())


def test_requests_are_refused_when_no_replica_comes_in_place_of_the_last() -> None:
    async def check() -> None:
        async with called(command=faulty(), patience_s=0.2) as (replicas, _, _):
            taken = replicas.submit(request("taken", max_tokens=60))
            first = await taken.get()
            replicas.set_present([])
            waiting = replicas.submit(request("waiting"))
            with pytest.raises(EngineDead, match="no replica became ready"):
                await follow(waiting)
            assert replicas.healthy(time.monotonic()) == "no replica is ready"
            with pytest.raises(EngineDead, match="no replica is ready"):
                replicas.submit(request("refused"))
            assert sum(len(one.token_ids) for one in first + await follow(taken)) == 60
            replicas.set_present(["r0"])
            await until(lambda: replicas.healthy(time.monotonic()) is None)

    run(check())


def test_aborts_reach_the_engine_or_end_the_request_here() -> None:
    async def check() -> None:
        async with called(command=faulty()) as (replicas, _, engines):
            stream = replicas.submit(request("a", n=2, temperature=1, max_tokens=400))
            await stream.get()
            stream.abort(0)
            stream.abort()
            outputs = await follow(stream, 2)
            assert {output.finish_reason for output in outputs} - {None} == {"abort"}
            stream = replicas.submit(request("b", max_tokens=400))
            await stream.get()
            replicas.set_present([])  # where calls of one replica no more arrive
            stream.abort()
            assert (await follow(stream))[-1].finish_reason == "abort"
            await until(lambda: not any(engine.status.has_work for engine in engines.values()))

    run(check())


def test_an_abort_may_overtake_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "MAX_EARLY", 1)

    async def check() -> None:
        async with called(1, command=faulty(10)) as (replicas, calls, engines):
            calls.late = {"whole", "part"}
            stream = replicas.submit(request("whole", max_tokens=100_000))
            await until(lambda: "whole" in replicas._calling)
            stream.abort()
            assert [one.finish_reason for one in await follow(stream)] == ["abort"]
            stream = replicas.submit(request("part", n=2, temperature=1, max_tokens=100))
            await until(lambda: "part" in replicas._calling)
            stream.abort(1)
            outputs = await follow(stream, 2)
            ends = {one.sequence: one.finish_reason for one in outputs if one.finish_reason is not None}
            assert ends == {0: "length", 1: "abort"}
            for _ in range(3):  # of requests that have ended
                calls.engines["r0"].abort("gone", None)
                calls.engines["r0"].abort("gone too", 0)
            assert [*calls.engines["r0"]._early] == ["gone too"]
            assert not engines["r0"].num_open

    run(check())


def test_a_request_that_kills_takes_no_other_with_it() -> None:
    """Two replicas die of it among others; then it is computed alone where the second one was."""

    async def check() -> None:
        async with called(config=DEMO, command=faulty(5)) as (replicas, _, engines):
            streams = [replicas.submit(one) for one in REQUESTS]
            with pytest.raises(EngineDead, match="killed") as ended:
                await follow(replicas.submit(request("poison", KILL)))
            assert "alone" in (ended.value.hint or "")
            expected = local(DEMO, REQUESTS)
            for one, stream in zip(REQUESTS, streams, strict=True):
                assert gist(await follow(stream, one.params.n)) == gist(expected[one.request_id])
            first, second = sorted(engine.status.num_restarts for engine in engines.values())
            assert first == 1
            assert second <= 5

    run(check())


def test_no_request_ends_for_deaths_that_it_shared_with_others() -> None:
    """Engines and replicas are lost before they give any token to two streams."""
    good = [request(str(number), 3 + number, max_tokens=4) for number in range(2)]
    expected = local(DEMO, good)

    async def check() -> None:
        async with called(1, DEMO, command=faulty(300)) as (replicas, calls, engines):
            streams = [replicas.submit(one) for one in good]
            for number in range(4):
                await until(lambda: all(own.sent for own in replicas._requests))
                await until(lambda: engines["r0"].status.has_work)
                if number % 2:  # the replica is lost with its engine, and comes back
                    calls.lost.add("r0")
                    os.kill(engines["r0"].status.pid or 0, signal.SIGKILL)
                    await until(lambda: not any(own.sent for own in replicas._requests))
                    calls.lost.clear()
                else:
                    before = engines["r0"].status.num_restarts
                    os.kill(engines["r0"].status.pid or 0, signal.SIGKILL)
                    await until(lambda before=before: engines["r0"].status.num_restarts > before)
                await until(lambda: is_ready(replicas))
            for one, stream in zip(good, streams, strict=True):
                assert gist(await follow(stream)) == gist(expected[one.request_id])

    run(check())


def test_a_refused_request_raises_and_one_that_kills_is_not_tried_forever() -> None:
    async def check() -> None:
        async with called(command=faulty()) as (replicas, _, engines):
            with pytest.raises(RequestError, match="maximum context length"):
                await follow(replicas.submit(request("long", *[5] * 600)))
            with pytest.raises(EngineDead, match="died"):
                await follow(replicas.submit(request("poison", KILL)))
            await until(lambda: is_ready(replicas))
            assert sum(engine.status.num_restarts for engine in engines.values()) <= 3
            assert len(await follow(replicas.submit(request("after"))))

    run(check())


def test_replicas_are_asked_for_as_the_load_needs_them() -> None:
    """By a scripted load on a fake clock; whatever runs the replicas does what the polls ask for."""

    async def check() -> None:
        scaler = Autoscaler(LatencyGoal(2.0), NULL, 1, 3)
        async with called(3, command=faulty(), autoscaler=scaler) as (replicas, calls, _):
            await scaler.close()  # the machine's clock tells nothing here: the test looks
            replicas.set_present(["r0"])
            assert len(await follow(replicas.submit(request("a")))) == 16
            assert replicas.observed(0.0) == (0.0, 1, (), 1, 3, 1, 0, 1, 16, 0, 0, 0)
            replicas.status.law = LAW
            clock = itertools.count(0.0, INTERVAL_S)

            async def until_there(count: int, num_refused: int) -> None:
                while replicas.numbers != [*range(count)]:
                    at_s = next(clock)
                    assert at_s < 3600, "not reached"
                    replicas.status.law = LAW  # not what the machine takes
                    scaler.look(replicas, at_s)
                    replicas.load.refused(num_refused, 400 * num_refused)
                    last = replicas.operations.last
                    if last is not None and last.seconds is None:
                        await until(lambda: calls.wanted == scaler.changes[-1].after)  # a poll tells
                        replicas.set_present([f"r{number}" for number in range(replicas.wanted)])
                        await until(lambda last=last: last.seconds is not None)
                        assert last.error is None

            await until_there(3, 100)
            assert replicas.start_up_s > 0
            streams = [replicas.submit(request(f"b{i}", max_tokens=60)) for i in range(6)]
            await until_there(1, 0)
            assert [sum(len(one.token_ids) for one in await follow(stream)) for stream in streams] == [60] * 6
            assert scaler.changes[0].before == scaler.changes[-1].after == 1

    run(check())


def test_decisions_and_replicas_can_be_listed() -> None:
    async def check() -> None:
        async with called(config=DEMO) as (replicas, _, engines):
            prompt = request("long", *range(3, 90), max_tokens=2)
            await follow(replicas.submit(prompt))
            await until(lambda: replicas.shown()[0].status.num_free_blocks or 0)
            await asyncio.sleep(0.2)  # for the poll that tells what is cached
            await follow(replicas.submit(replace(prompt, request_id="again")))
            first, second = replicas.decisions.last
            assert (first.request_id, second.request_id) == ("long", "again")
            assert first.replica == second.replica
            assert second.num_blocks == 5
            cards = replicas.shown()
            assert [(one.number, one.name, one.health, one.num_open) for one in cards] == [
                (0, "r0", "ready", 0),
                (1, "r1", "ready", 0),
            ]
            assert {one.status.pid for one in cards} == {one.status.pid for one in engines.values()}

    run(check())


class Views:
    """An engine that notes whether it makes views of its steps."""

    def __init__(self) -> None:
        self.status, self.asked = EngineStatus(), list[bool]()
        self.watch = self.asked.append

    def follow_cache(self, on: bool) -> None: ...


def test_views_are_made_only_while_a_follower_that_is_there_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        engine = Views()
        calls = EngineCalls(engine)  # type: ignore[arg-type]
        await calls.poll("killed", True, False)
        monkeypatch.setattr(engine_calls, "FORGET_S", 0.0)
        await calls.poll("next", False, False)
        assert engine.asked == [True, False]
        monkeypatch.setattr(engine_calls, "MAX_REPORTS", 0)
        await calls.poll("next", True, False)
        calls._take_report(StepReport(None, 0, 0, 0))
        assert engine.asked == [True, False, True, False]

    run(check())


def test_times_of_another_host_are_those_of_the_caller() -> None:
    async def check() -> None:
        async with called(1, command=faulty()) as (replicas, calls, _):
            calls.host = "elsewhere"
            sent = request("a")
            metrics = (await follow(replicas.submit(sent)))[-1].metrics
            assert metrics is not None
            assert abs(metrics.arrival_s - sent.arrival_s) < 1e-6
            assert metrics.first_token_s is not None
            assert sent.arrival_s < metrics.first_token_s

    run(check())
