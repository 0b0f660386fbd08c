"""An engine whose requests are calls that stream: the engine's side of `called_replicas`.

Every answer is frames of `engine_messages`. The caller reaches it through whatever carries bytes, such as
the handles of Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.engine.client import Stream
from quire.engine.open_request import OpenRequest
from quire.engine.status import Facts, StepReport
from quire.errors import EngineDead, RequestError
from quire.server import engine_messages as messages
from quire.server.engine_messages import EngineMessage, FrameReader
from quire.server.remote import RemoteEngine
from quire.types import NewRequest, Output

GATHER_S = 0.05  # in which the reports of several steps become one answer
IDLE_S = 1.0  # after which a poll is answered without news
FORGET_S = 30.0  # without a poll, after which a follower is forgotten
MAX_REPORTS = 4096  # kept for a follower; one that takes fewer begins anew
MAX_EARLY = 1024  # requests whose abort came before them, or after their end


class Call(messages.Submit):
    """Run a request that so many engines died with before: see OpenRequest."""

    num_deaths: int = 0
    num_deaths_alone: int = 0


_CALL = msgspec.msgpack.Decoder(Call)


class RequestLost(EngineMessage):
    """The engine does not go on with a request. The deaths are those of its Call and of this engine."""

    problem: str
    num_deaths: int
    num_deaths_alone: int


class ReplicaReady(EngineMessage):
    """The engine takes requests, after so many restarts. `pid` is that of its process on the host."""

    facts: Facts
    num_restarts: int
    host: str
    pid: int | None


class ReplicaUnready(EngineMessage):
    """The engine takes no requests until it is ready again."""


Answer = messages.Stepped | messages.RequestRefused | RequestLost  # of `generate`
News = ReplicaReady | ReplicaUnready | messages.Stepped  # of `poll`


def answer_reader() -> FrameReader[Answer]:
    return FrameReader(msgspec.msgpack.Decoder(Answer))


def news_reader() -> FrameReader[News]:
    return FrameReader(msgspec.msgpack.Decoder(News))


class Follower:
    """One that polls: the reports it has not had yet."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.news = asyncio.Event()
        self.polled_s = time.monotonic()
        self.watches = False


class EngineCalls:
    """The calls that an engine answers. Use it from the event loop that started the engine."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._followers: dict[str, Follower] = {}
        self._watched = False
        self._running: set[str] = set()
        self._early: dict[str, list[int | None]] = {}  # aborts of requests that do not run, the oldest first
        self._host = host_id()
        engine.on_record = self._take_report
        engine.on_lost = self._end_all

    async def generate(self, call: bytes, host: str, sent_s: float) -> AsyncGenerator[bytes, None]:
        """Run the request of a Call; yield the frames of each Answer.

        `host` is where the caller runs, and `sent_s` its time.monotonic(), which is ours only there. When the
        engine dies, only a suspect stays, to be computed alone by the next one.
        """
        (message,) = FrameReader(_CALL).feed(call)
        ahead_s = 0.0 if host == self._host else time.monotonic() - sent_s
        request = message.checked()
        own = OpenRequest(replace(request, arrival_s=request.arrival_s + ahead_s), self._engine)
        own.num_deaths, own.num_deaths_alone = message.num_deaths, message.num_deaths_alone
        try:
            if not self._is_ready:
                raise EngineDead(f"the engine is {self._engine.status.state}")
            self._engine.adopt(own)
            self._running.add(request.request_id)
            for sequence in self._early.pop(request.request_id, ()):
                self._engine.abort(request.request_id, sequence)
            stream = Stream(own)
            num_open = _num_open(request)
            while num_open:
                outputs = await stream.get()
                num_open -= sum(output.finish_reason is not None for output in outputs)
                if ahead_s:
                    outputs = [_earlier(output, ahead_s) for output in outputs]
                yield bytes(messages.encode(messages.Stepped(outputs, None)))
        except RequestError as error:
            yield bytes(messages.encode(messages.RequestRefused.of(request.request_id, error)))
        except EngineDead as error:
            lost = RequestLost(error.message, own.num_deaths, own.num_deaths_alone)
            yield bytes(messages.encode(lost))
        finally:
            self._running.discard(request.request_id)

    def abort(self, request_id: str, sequence: int | None) -> None:
        """End a request, or one sequence of it, also one that comes later. Final outputs follow as usual."""
        if request_id in self._running:
            self._engine.abort(request_id, sequence)
            return
        self._early.setdefault(request_id, []).append(sequence)
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    async def poll(self, name: str, watches: bool, ready: bool) -> bytes:
        """Return the News for a follower, after waiting for some.

        They are whether the engine is ready, if the follower takes it to be otherwise (`ready`), and the
        reports of steps, in a first answer with all that is cached. `watches`: with views of the steps.
        """
        follower = self._follower(name)
        if follower.watches != watches:
            follower.watches = watches
            self._watch()
        if ready == self._is_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(follower.news.wait(), IDLE_S if ready else GATHER_S)
                await asyncio.sleep(GATHER_S)
        follower.polled_s = time.monotonic()
        follower.news.clear()
        frames, status = bytearray(), self._engine.status
        if ready != self._is_ready:
            now = ReplicaReady(status.facts, status.num_restarts, socket.gethostname(), status.pid)
            frames += messages.encode(ReplicaUnready() if ready else now)
        reports, follower.reports = follower.reports, []
        for report in reports:
            frames += messages.encode(messages.Stepped([], report))
        return bytes(frames)

    @property
    def _is_ready(self) -> bool:
        return self._engine.status.state == "ready"

    def _follower(self, name: str) -> Follower:
        found = self._followers.get(name)
        if found is None:
            now = time.monotonic()
            kept = self._followers.items()
            self._followers = {one: has for one, has in kept if now - has.polled_s < FORGET_S}
            found = self._followers[name] = Follower()
            self._watch()
            self._engine.follow_cache(True)
        return found

    def _watch(self) -> None:
        """Ask the engine for views if any follower wants them."""
        if (watched := any(one.watches for one in self._followers.values())) != self._watched:
            self._watched = watched
            self._engine.watch(watched)

    def _take_report(self, report: StepReport) -> None:
        for name, follower in [*self._followers.items()]:
            if len(follower.reports) >= MAX_REPORTS:
                del self._followers[name]
                self._watch()
                continue
            follower.reports.append(report)
            follower.news.set()

    def _end_all(self, lost: list[OpenRequest]) -> None:
        """End the requests of an engine that died: their callers go on with them elsewhere."""
        for own in lost:
            own.fail(EngineDead("the engine died"))
        for follower in self._followers.values():
            follower.news.set()


def host_id() -> str:
    """Return what identifies this boot of this machine: processes with the same one share a clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _num_open(request: NewRequest) -> int:
    return request.params.num_sequences - sum(ids is None for ids in request.resumed)


def _earlier(output: Output, ahead_s: float) -> Output:
    """Return an output with its times on the clock of another host."""
    times = output.metrics
    if times is None:
        return output
    names = ("arrival_s", "admitted_s", "first_token_s", "finished_s")
    shifted = {name: at_s - ahead_s for name in names if (at_s := getattr(times, name)) is not None}
    return output._replace(metrics=replace(times, **shifted))
