"""Replicas as one EngineClient: their outputs are those of one engine, whatever dies or is replaced."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_engine import KILL, RAISE, SLEEP
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
    request,
    run,
    until,
)
from replica_engines import kill, operation, replicas

from quire.cluster.adapters import change_all
from quire.config import EngineConfig
from quire.engine.client import EngineClient, Stream
from quire.engine.status import AdapterFacts, EngineStatus, StepReport
from quire.errors import ConfigError, Conflict, EngineDead, RequestError
from quire.server.adapter_changes import AdapterChanges
from quire.server.service import ServiceState
from quire.types import NewRequest

REQUESTS = [
    request("greedy", *range(3, 90), max_tokens=40),
    request("logprobs", 9, 8, 7, logprobs=5, prompt_logprobs=3, temperature=1, seed=-(2**63), max_tokens=30),
    request("seed", 9, 8, 7, logprobs=0, temperature=1.5, top_p=0.9, seed=2**63 - 1, max_tokens=50),
    request("sequences", 4, 5, n=3, temperature=1, logprobs=1, max_tokens=24),
    request("bias", 4, 5, logit_bias={10: 3.25, 11: -100}, presence_penalty=0.1, max_tokens=40),
    request("stop", 4, 5, temperature=1, stop_token_ids=list(range(0, 400, 9)), min_tokens=2, max_tokens=60),
]


async def same(streams: Mapping[str, Stream], expected: Mapping[str, Any]) -> None:
    """Follow streams to their ends: no output is missing, repeated or different."""
    for one in REQUESTS:
        outputs = await follow(streams[one.request_id], one.params.n)
        assert gist(outputs) == gist(expected[one.request_id]), one.request_id


def sent(engine: EngineClient, requests: Iterable[NewRequest] = REQUESTS) -> dict[str, Stream]:
    return {one.request_id: engine.submit(one) for one in requests}


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Any]:
    """What one engine gives."""
    return local(DEMO, REQUESTS)


def test_outputs_are_those_of_one_engine(expected: Mapping[str, Any]) -> None:
    async def check() -> None:
        async with replicas(config=DEMO) as (several, router):
            await same(sent(several), expected)
            steps = [status.steps for status in several.statuses.values()]
            assert len(steps) == 2
            assert min(steps) > 0
            assert sorted(name for name, _ in router.begun) == sorted(expected)
            assert not router.open
            assert [len(ask.hashes) for ask in router.asks] == [(87 - 1) // 16, 0, 0, 0, 0, 0]

    run(check())


def test_the_status_of_all_is_that_of_each_together() -> None:
    async def check() -> None:
        reports: list[StepReport] = []
        async with replicas(command=faulty(10)) as (several, router):
            several.on_record = reports.append
            first, second = several.statuses.values()
            assert several.status.state == "ready"
            assert several.status.num_blocks == first.num_blocks + second.num_blocks > first.num_blocks > 0
            assert several.status.facts.limits == first.facts.limits
            assert several.status.facts.chosen["replicas"].startswith("2 (0: cpu")
            streams = [several.submit(request(str(i))) for i in range(4)]
            await until(lambda: several.status.num_running == 4)
            assert (first.num_running, second.num_running) == (2, 2)
            assert several.status.has_work
            for stream in streams:
                assert len(await follow(stream)) == 16
            status = several.status
            assert not status.has_work
            assert status.steps == first.steps + second.steps
            assert list(status.records) == [report.record for report in reports if report.record is not None]
            assert status.totals.num_tokens == first.totals.num_tokens + second.totals.num_tokens
            assert {report.replica for report in reports} == {0, 1}
            assert router.num_reports >= len(reports)
            assert status.num_free_blocks == status.num_blocks
        assert several.status.state == "stopped"
        assert several.healthy(time.monotonic()) == "the engine is stopped"

    run(check())


@pytest.mark.parametrize("step_ms", [2, 10])
def test_requests_of_a_replica_that_dies_go_on_elsewhere(expected: Mapping[str, Any], step_ms: int) -> None:
    """At once, as none waits for the restart."""

    async def check() -> None:
        async with replicas(config=DEMO, command=faulty(step_ms)) as (several, router):
            streams = sent(several)
            pid = several.statuses[1].pid
            assert pid is not None
            await until(lambda: several.statuses[1].steps >= 4)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: router.health[1] == "restarting")
            assert set(router.open.values()) <= {0}
            await same(streams, expected)
            assert several.healthy(time.monotonic()) is None
            await until(lambda: several.statuses[1].state == "ready")
            assert several.status.num_restarts == 1
            await same(sent(several), expected)  # by both again
            assert set(router.health.values()) == {"ready"}

    run(check())


def test_requests_go_on_when_all_replicas_have_died(expected: Mapping[str, Any]) -> None:
    async def check() -> None:
        async with replicas(config=DEMO, command=faulty(5)) as (several, _):
            streams = sent(several)
            await until(lambda: all(status.steps >= 3 for status in several.statuses.values()))
            for status in several.statuses.values():
                assert status.pid is not None
                os.kill(status.pid, signal.SIGKILL)
            await until(lambda: several.status.state != "ready")
            assert several.healthy(time.monotonic()) is not None
            with pytest.raises(EngineDead):
                several.submit(request("now"))
            await same(streams, expected)

    run(check())


def test_a_request_that_kills_engines_does_not_kill_them_forever() -> None:
    async def check() -> None:
        async with replicas(command=faulty(5)) as (several, router):
            with pytest.raises(EngineDead):
                await follow(several.submit(request("deadly", KILL)))
            await until(lambda: several.status.state == "ready")
            assert len(await follow(several.submit(request("good")))) == 16
            assert not router.open
            assert several.status.num_restarts <= 3

    run(check())


def test_a_drained_replica_gets_nothing_new_and_ends_what_it_has() -> None:
    async def check() -> None:
        async with replicas(command=faulty(10)) as (several, router):
            stream = several.submit(request("a", max_tokens=60))
            key, pid = router.open["a"], several.statuses[0].pid
            await until(lambda: several.statuses[0].steps)
            several.operations.begin("restarting", several.restart([0]))
            await until(lambda: several.all()[0].is_draining)
            others = [several.submit(request(f"b{i}")) for i in range(3)]
            assert {router.open[f"b{i}"] for i in range(3)} == {1}
            assert router.health[key] == "draining"  # until its request has ended, when it may be gone
            assert len(await follow(stream)) == 60
            for other in others:
                await follow(other)
            await operation(several)
            assert router.health == {0: "gone", 1: "ready", 2: "restarting"}  # until a request is routed
            assert several.numbers == [0, 1]
            assert several.statuses[0].pid != pid is not None
            await asyncio.gather(*(follow(several.submit(request(f"c{i}"))) for i in range(2)))
            assert router.health[2] == "ready"
            assert {status.state for status in several.statuses.values()} == {"ready"}
            assert several.statuses[0].steps > 0
            await until(lambda: not exists(pid))

    run(check())


@pytest.mark.parametrize("drain_s", [0.0, 0.1])
def test_no_request_is_lost_while_all_replicas_are_replaced(
    expected: Mapping[str, Any], drain_s: float
) -> None:
    """Those that have not ended in time go on elsewhere, from where they are."""

    async def check() -> None:
        async with replicas(config=DEMO, drain_s=drain_s, command=faulty(20)) as (several, router):
            pids = {status.pid for status in several.statuses.values()}
            streams = sent(several)
            await until(lambda: several.status.steps >= 6)
            several.operations.begin("restarting all", several.restart(several.numbers))
            with pytest.raises(Conflict, match="restarting all has not ended"):
                several.operations.begin("scaling", several.scale(1))
            await same(streams, expected)
            await operation(several)
            assert len(router.asks) > len(REQUESTS)  # some were moved
            assert pids.isdisjoint({status.pid for status in several.statuses.values()})
            assert not router.open

    run(check())


def test_scaling_down_and_up_loses_nothing(expected: Mapping[str, Any]) -> None:
    async def check() -> None:
        async with replicas(3, config=DEMO, drain_s=0.0, command=faulty(10)) as (several, router):
            for count in (1, 3, 2):
                streams = sent(several)
                await until(lambda: len(router.begun) and several.status.num_running)
                several.operations.begin(f"scaling to {count}", several.scale(count))
                await same(streams, expected)
                await operation(several)
                assert several.numbers == list(range(count))
                assert len(several.status.facts.chosen["replicas"].split(",")) == count
            assert sum(health == "gone" for health in router.health.values()) == 3

    run(check())


def test_the_last_replica_is_not_stopped() -> None:
    """Nobody would serve meanwhile: it goes on, and the operation, until another one is there."""

    async def check() -> None:
        async with replicas(drain_s=0.0, policy=None, command=faulty(5)) as (several, _):
            assert several.serves_without(0)
            await kill(several, 1, "restarting")
            assert not several.serves_without(0)
            several.operations.begin("restarting", several.restart([0]))
            await asyncio.sleep(0)
            assert len(await follow(several.submit(request("a")))) == 16
            assert several.numbers == [0, 1]
            await operation(several)
            assert {status.state for status in several.statuses.values()} == {"ready"}

    run(check())


def test_a_replica_is_not_drained_for_one_that_was_given_up() -> None:
    """The operation ends, and the other one can be replaced."""

    async def check() -> None:
        async with replicas(drain_s=0.0, policy=replace(QUICK, max_deaths=1)) as (several, _):
            await kill(several, 0, "stopped")
            several.operations.begin("restarting", several.restart([1]))
            last = several.operations.last
            assert last is not None
            await until(lambda: last.seconds is not None, 10)
            assert "replica 1 goes on" in str(last.error)
            assert [one.serves for one in several.all()] == [False, True]
            several.operations.begin("restarting", several.restart([0]))
            await operation(several)
            assert [one.serves for one in several.all()] == [True, True]

    run(check())


def test_scaling_down_stops_what_was_given_up_first() -> None:
    async def check() -> None:
        async with replicas(3, drain_s=0.0, policy=replace(QUICK, max_deaths=1)) as (several, _):
            await kill(several, 0, "stopped")
            several.operations.begin("scaling", several.scale(1))
            await operation(several)
            assert several.numbers == [1]
            assert len(await follow(several.submit(request("a")))) == 16

    run(check())


def test_what_was_given_up_is_started_anew() -> None:
    """So many replicas run as are asked for, also if as many were there and one of them had died."""

    async def check() -> None:
        async with replicas(2, drain_s=0.0, policy=replace(QUICK, max_deaths=1)) as (several, _):
            await kill(several, 0, "stopped")
            assert several.numbers == [1]
            several.operations.begin("scaling", several.scale(2))
            await operation(several)
            assert several.numbers == [0, 1]
            assert [one.serves for one in several.all()] == [True, True]

    run(check())


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """The adapters of each process, which it loads and unloads at once; one named "bad" by the first only."""
    loaded: dict[int, list[str]] = {}

    async def change(self: AdapterChanges, name: str, path: str | None) -> None:
        child = self._child()
        problem = self._problem()
        if child is None or problem is not None:
            raise EngineDead(problem or "no process")
        own = loaded.setdefault(child.process.pid, [])
        if (name in own) == (path is not None) or (name == "bad" and path is not None and len(loaded) > 1):
            raise RequestError("not so")
        (own.remove if path is None else own.append)(name)

    monkeypatch.setattr(AdapterChanges, "change", change)
    return loaded


def test_adapters_change_also_where_a_replica_was_given_up(adapters: dict[int, list[str]]) -> None:
    async def check() -> None:
        async with replicas(policy=replace(QUICK, max_deaths=1)) as (several, _):
            other = several.statuses[1].pid
            await kill(several, 0, "stopped")
            await several.change_adapter("one", "folder")
            assert adapters == {other: ["one"]}
            await several.change_adapter("one", None)
            assert adapters == {other: []}

    run(check())


def test_adapters_change_in_all_replicas_or_in_none(adapters: dict[int, list[str]]) -> None:
    async def check() -> None:
        policy = replace(QUICK, first_delay_s=1.0)
        async with replicas(policy=policy) as (several, _):
            with pytest.raises(RequestError):
                await several.change_adapter("bad", "folder")
            assert [*adapters.values()] == [[], []]
            await kill(several, 1, "restarting")
            with pytest.raises(EngineDead):
                await several.change_adapter("one", "folder")
            assert [*adapters.values()] == [[], []]
            await until(lambda: several.statuses[1].state == "ready")
            await several.change_adapter("one", "folder")
            assert [adapters[status.pid or 0] for status in several.statuses.values()] == [["one"], ["one"]]

    run(check())


def test_a_replica_that_joins_has_the_adapters_that_came_meanwhile(adapters: dict[int, list[str]]) -> None:
    async def check() -> None:
        async with replicas() as (several, _):
            await several.scale(1)
            first = several.all()[0].engine.status

            def told(*names: str) -> None:
                own = tuple(AdapterFacts(f"{name}@0", name, "folder", 1, 1, ()) for name in names)
                first.facts = first.facts._replace(adapters=own)

            told("kept", "unloaded")
            several.operations.begin("scaling", several.scale(2))
            await until(lambda: len(several.all()) == 2)
            process = several.all()[1].engine.status
            await until(lambda: process.pid is not None)
            adapters[process.pid or 0] = ["kept", "unloaded"]
            told("kept", "loaded")
            await operation(several)
            assert adapters[process.pid or 0] == ["kept", "loaded"]

    run(check())


def test_statuses_are_read_while_a_replica_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that answers a scrape."""

    async def check() -> None:
        async with replicas() as (several, _):
            ready = SimpleNamespace(state="ready")
            both = {number: SimpleNamespace(number=number, status=ready) for number in (0, 1)}
            monkeypatch.setattr(several, "_replicas", Removed(both))
            assert dict(several.statuses) == {0: ready, 1: ready}
            monkeypatch.undo()

    class Removed(dict[int, Any]):
        """Replicas of which one is removed as soon as the first was looked at."""

        def items(self) -> Any:
            for number, replica in super().items():
                yield number, replica
                self.pop(1, None)

        def values(self) -> Any:
            return (replica for _, replica in self.items())

    run(check())


def test_aborts_reach_the_replica_that_has_the_request() -> None:
    async def check() -> None:
        async with replicas(drain_s=0.0, command=faulty(50)) as (several, router):  # none ends before
            for name in ("by stream", "by client", "moved", "dropped"):
                stream = several.submit(request(name, max_tokens=400))
                await stream.get()
                if name == "moved":
                    number = router.open[name]
                    several.operations.begin("restarting", several.restart([several.numbers[number % 2]]))
                    await until(lambda name=name, number=number: router.open[name] != number)
                if name == "dropped":
                    del stream
                    gc.collect()
                    await until(lambda: not router.open)
                    continue
                if name == "by client":
                    several.abort(name)
                else:
                    stream.abort()
                assert (await follow(stream))[-1].finish_reason == "abort"
                assert not router.open
            await operation(several)
            await until(lambda: several.status.num_running == 0)
            assert several.status.num_free_blocks == several.status.num_blocks

    run(check())


def test_refusals_are_those_of_one_engine() -> None:
    async def check() -> None:
        async with replicas(command=faulty(5)) as (several, router):
            stream = several.submit(request("a", max_tokens=100))
            with pytest.raises(RequestError, match="'a' is in use"):
                several.submit(request("a"))
            with pytest.raises(RequestError):
                await follow(several.submit(request("long", *([3] * 600))))
            assert set(router.open) == {"a"}
            assert len(await follow(stream)) == 100
            assert len(await follow(several.submit(request("a")))) == 16

    run(check())


def test_the_first_replica_is_watched() -> None:
    async def check() -> None:
        seen: set[int] = set()

        def note(report: StepReport) -> None:
            if report.view is not None:
                seen.add(report.replica)

        async def served() -> set[int]:
            seen.clear()
            await asyncio.gather(*(follow(several.submit(request(f"{i}"))) for i in range(2)))
            return seen

        async with replicas(drain_s=0.0) as (several, _):
            several.on_record = note
            assert await served() == set()
            several.watch(True)
            assert await served() == {0}
            several.operations.begin("restarting", several.restart([0]))
            await operation(several)
            assert await served() == {0}
            several.watch(False)
            assert await served() == set()

    run(check())


def test_the_first_is_one_that_was_not_given_up() -> None:
    """Its facts are those of all, and it is the one that is watched."""

    async def check() -> None:
        async with replicas(policy=replace(QUICK, max_deaths=1)) as (several, _):
            seen: set[int] = set()
            several.on_record = lambda report: seen.add(report.replica if report.view is not None else -1)
            several.watch(True)
            await kill(several, 0, "stopped")
            assert [*several.statuses] == [1, 0]
            adapters = (AdapterFacts("new@0", "new", "folder", 1, 1, ()),)
            several.statuses[1].facts = several.statuses[1].facts._replace(adapters=adapters)
            assert several.status.facts.adapters == adapters
            await follow(several.submit(request("a")))
            await until(lambda: 1 in seen)

    run(check())


def test_what_was_given_up_is_not_counted() -> None:
    async def check() -> None:
        async with replicas(policy=replace(QUICK, max_deaths=1)) as (several, _):
            service: Any = SimpleNamespace(engine_config=EngineConfig(max_num_seqs=4), engine=several)
            assert ServiceState.num_slots.fget(service) == 8  # type: ignore[attr-defined]
            await kill(several, 0, "stopped")
            status, left = several.status, several.statuses[1]
            assert status.num_blocks == status.num_free_blocks == left.num_blocks > 0
            assert status.facts.chosen["replicas"].startswith("1 (1: cpu")
            assert ServiceState.num_slots.fget(service) == 4  # type: ignore[attr-defined]

    run(check())


class Having:
    """An engine with these adapters, which dies of changing them if it is told to."""

    def __init__(self, *names: str) -> None:
        self.status = EngineStatus(state="ready")
        self.dies = False
        self.has(names)

    def has(self, names: Iterable[str]) -> None:
        own = tuple(AdapterFacts(f"{name}@0", name, "folder", 1, 1, ()) for name in names)
        self.status.facts = self.status.facts._replace(adapters=own)

    async def change_adapter(self, name: str, path: str | None) -> None:
        names = {own.name for own in self.status.facts.adapters}
        if self.dies:
            raise EngineDead("it died")
        if (name in names) == (path is not None):
            raise RequestError("not so")
        self.has(names ^ {name})


def test_an_adapter_that_an_engine_kept_by_dying_is_unloaded_again() -> None:
    async def check() -> None:
        engines: list[Any] = [Having("one") for _ in range(3)]
        engines[1].dies = True
        with pytest.raises(EngineDead):
            await change_all(engines, "one", None)
        assert [len(one.status.facts.adapters) for one in engines] == [0, 1, 0]
        engines[1].dies = False
        await change_all(engines, "one", None)
        assert not engines[1].status.facts.adapters
        with pytest.raises(RequestError):
            await change_all(engines, "one", None)

    run(check())


def test_a_replica_that_does_not_start_ends_all() -> None:
    async def check() -> None:
        with pytest.raises(ConfigError, match="no-such-model"):
            async with replicas(config=EngineConfig(model="./no-such-model")):
                pass
        async with replicas(command=faulty(5)) as (several, router):
            stream = several.submit(request("a", max_tokens=100))
            several._make = lambda place: broken()
            several.operations.begin("restarting", several.restart([1]))
            last = several.operations.last
            assert last is not None
            await until(lambda: last.seconds is not None)
            assert last.error is not None
            assert "status 1" in last.error
            assert several.numbers == [0]
            assert router.health == {0: "ready", 1: "gone", 2: "gone"}
            assert len(await follow(stream)) == 100

    run(check())


def test_a_replica_that_does_not_start_does_not_end_the_operation_before_others_have_started() -> None:
    """Else the next operation would start another engine in a place where one starts."""

    async def check() -> None:
        async with replicas(3) as (several, _):
            several.operations.begin("scaling down", several.scale(1))
            await operation(several)
            make, second = several._make, several.places[1]
            several._make = lambda place: broken() if place is second else make(place)
            several.operations.begin("scaling up", several.scale(3))
            last = several.operations.last
            assert last is not None
            await until(lambda: last.seconds is not None)
            assert last.error is not None
            assert several.numbers == [0, 2]
            several._make = make
            several.operations.begin("scaling up again", several.scale(3))
            await operation(several)
            assert several.numbers == [0, 1, 2]

    run(check())


def broken() -> Any:
    import sys

    from quire.server.remote import RemoteEngine

    return RemoteEngine(NULL, command=(sys.executable, "-c", "raise SystemExit(1)"))


def test_open_streams_end_with_the_client() -> None:
    async def check() -> None:
        async with replicas(command=faulty(50)) as (several, _):
            streams = [several.submit(request(str(i), max_tokens=400)) for i in range(3)]
            pids = [status.pid for status in several.statuses.values()]
            several.operations.begin("restarting", several.restart([0]))
            await asyncio.sleep(0.05)
        for stream in streams:
            with pytest.raises(EngineDead):
                await asyncio.wait_for(follow(stream), LIMIT_S)
        assert not any(pid is not None and exists(pid) for pid in pids)

    run(check())


def test_a_request_that_kills_stays_with_one_replica(expected: Mapping[str, Any]) -> None:
    """Two replicas die of it and of others; then it is computed alone where the second one was."""

    async def check() -> None:
        async with replicas(config=DEMO, command=faulty(5)) as (several, _):
            streams = sent(several)
            with pytest.raises(EngineDead):
                await follow(several.submit(request("bad", KILL)))
            await until(lambda: {one.state for one in several.statuses.values()} == {"ready"})
            first, second = sorted(one.num_restarts for one in several.statuses.values())
            assert first == 1
            assert second <= 5
            await same(streams, expected)

    run(check())


def test_what_a_replica_that_is_given_up_held_goes_on_elsewhere() -> None:
    slow, policy = request("slow", SLEEP), replace(QUICK, max_deaths=2)
    expected = local(DEMO, [slow])

    async def check() -> None:
        async with replicas(config=DEMO, command=faulty(5), policy=policy) as (several, _):
            stream = several.submit(slow)
            other = several.submit(request("other", SLEEP, max_tokens=400))  # so that it is not alone once
            for number in (0, 1, 1):  # after two deaths it is a suspect, and stays
                status, opened = several.statuses[number], several.all()[number].engine._requests
                for _ in range(2):  # it is first sent, and later admitted
                    await until(lambda opened=opened: any(own.exposed for own in opened))
                    await asyncio.sleep(0.1)
                assert status.pid is not None
                os.kill(status.pid, signal.SIGKILL)
                await until(lambda status=status, pid=status.pid: status.pid != pid)
            await until(lambda: several.statuses[1].state == "stopped")
            assert gist(await follow(stream)) == gist(expected["slow"])
            assert several.statuses[0].num_restarts == 1
            assert sum(len(output.token_ids) for output in await follow(other)) == 400

    run(check())


def test_errors_of_an_engine_are_no_errors_of_its_requests(expected: Mapping[str, Any]) -> None:
    """One that raises takes its own request with it, in the end, and no other."""

    async def check() -> None:
        async with replicas(config=DEMO, command=faulty(5)) as (several, _):
            streams = sent(several)
            with pytest.raises(EngineDead):
                await follow(several.submit(request("bad", RAISE)))
            await same(streams, expected)

    run(check())
