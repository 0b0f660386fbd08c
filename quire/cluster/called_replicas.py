"""CalledReplicas: an EngineClient over replicas in other processes or hosts, reached by calls that stream.

Which replicas there are is told by whatever runs them, such as Ray Serve, which also carries the calls. Each
replica answers with `engine_calls`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, Literal

from quire.cluster.autoscaling import Autoscaler
from quire.cluster.calls import CalledReplica, Calls, LostCall, Readiness, given, named
from quire.cluster.decisions import DecisionLog
from quire.cluster.engine_calls import (
    Answer,
    Call,
    News,
    ReplicaReady,
    ReplicaUnready,
    RequestLost,
    answer_reader,
    host_id,
    news_reader,
)
from quire.cluster.operations import Operations
from quire.cluster.several import ShownReplica
from quire.engine.client import LoopClient, Stream
from quire.engine.open_request import MAX_DEATHS, OpenRequest
from quire.engine.request import prompt_hashes
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, RequestError
from quire.routing.load_counts import LoadCounts
from quire.routing.router import Ask, Router
from quire.routing.scaling import Observed
from quire.server import engine_messages as messages
from quire.types import NewRequest, Output

RETRY_S = 0.1  # before a call is made again
SCALING_S = 600.0  # within which there should be as many replicas as are wanted
_LOG = logging.getLogger(__name__)


class CalledReplicas(LoopClient):
    """An EngineClient that gives each request to a replica, and goes on elsewhere when that is lost.

    When none is ready, requests wait for one until `patience_s` after the last was. Use it from the event
    loop that made it. With an autoscaler it tells the replicas how many there should
    be (`wanted`; 0 before that is known), and whatever runs them asks these.
    """

    own = None  # they are started and ended by whatever carries the calls
    of_front: ClassVar[CalledReplicas | None] = None  # of the front that this process is

    def __init__(
        self,
        calls: Calls,
        router: Router,
        autoscaler: Autoscaler | None = None,
        patience_s: float = 30.0,
    ) -> None:
        super().__init__()
        self.observe(self)
        self.decisions, self.load, self.operations = DecisionLog(), LoadCounts(), Operations()
        self.autoscaler = autoscaler
        self.wanted = 0
        self.start_up_s = 0.0  # of the replicas that were added last
        self._asked_s = 0.0  # when they were asked for
        self._calls = calls
        self._router = router
        self._name = secrets.token_hex(4)  # distinguishes its requests from those of other callers
        self._host = host_id()
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, CalledReplica] = {}  # by their names
        self._asks: dict[str, Ask] = {}  # of open requests, by the ids that they have in engines
        self._calling: dict[str, tuple[str, str]] = {}  # replica and id there of open requests, by their ids
        self._running: dict[str, asyncio.Task[None]] = {}  # of open requests, by their ids
        self._tasks: set[asyncio.Task[None]] = set()  # all
        self._watched = False
        self._ready = Readiness(patience_s)

    # As an EngineClient

    @property
    def statuses(self) -> Mapping[int, EngineStatus]:
        return {one.number: one.status for one in self._replicas.values()} or {0: self.status}

    async def start(self) -> None:
        """Wait until a replica is ready."""
        await self._ready.found(forever=True)
        if self.autoscaler is not None:
            self.autoscaler.begin(self)

    def submit(self, request: NewRequest) -> Stream:
        if (problem := self.healthy(time.monotonic())) is not None:
            raise EngineDead(problem, "send the request again in a moment")
        own = self._requests.open(OpenRequest(request, self))
        self.status.take_work()
        self.load.arrived(request.request_id, len(request.prompt_token_ids))
        task = self._running[request.request_id] = self._spawn(self._run(own))
        task.add_done_callback(lambda _: self._note_end(request.request_id))
        return Stream(own)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        own = self._requests.get(request_id)
        if own is None:
            return
        own.note_abort(sequence)
        there, name = self._calling.get(request_id, ("", ""))
        if there in self._replicas:
            self._spawn(self._abort(own, there, name, sequence))
        else:
            self._deliver(own, own.aborted_outputs(time.monotonic()))
            if own.ended:
                self._running[request_id].cancel()

    def abort_later(self, own: OpenRequest) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_dropped, own)

    def _abort_dropped(self, own: OpenRequest) -> None:
        if not own.ended:
            self.abort(own.request.request_id)

    def watch(self, on: bool) -> None:
        self._watched = on

    def healthy(self, now: float) -> str | None:
        """Return None also while requests wait for a replica."""
        return "the server is shutting down" if self.status.state == "stopped" else self._ready.problem(now)

    async def close(self) -> None:
        self.status.state = "stopped"
        if self.autoscaler is not None:
            await self.autoscaler.close()
        await self.operations.close()
        for task in [*self._tasks]:
            task.cancel()
        self._fail_all(EngineDead("the server is shutting down"))

    # As several engines, whose number may follow the load

    @property
    def numbers(self) -> list[int]:
        """The replicas that new requests may be sent to, also while they are restarted."""
        return sorted(one.number for one in self._replicas.values())

    @property
    def num_places(self) -> int:
        return len(self._replicas) if self.autoscaler is None else self.autoscaler.most

    def shown(self) -> Sequence[ShownReplica]:
        calls = Counter(there for there, _ in self._calling.values())
        cards = [
            ShownReplica(one.number, one.status, one.status.state, calls[name], host=one.host, name=name)
            for name, one in self._replicas.items()
        ]
        return sorted(cards, key=lambda card: card.number)

    def observed(self, at_s: float) -> Observed:
        """Return the load, and how many replicas there are, as a scaler sees them."""
        left_s = max(0.0, self._asked_s + self.start_up_s - time.monotonic())
        several = self._replicas.values()
        starting_s = [self.start_up_s for one in several if not one.is_ready]
        starting_s += [left_s] * (self.wanted - len(several))
        return self.load.observed(at_s, sum(one.is_ready for one in several), tuple(starting_s))

    async def scale(self, count: int) -> None:
        """Ask for so many replicas, and wait for them. Raises EngineDead if they do not come."""
        adds = count > len(self._replicas)
        self.wanted, self._asked_s = count, time.monotonic()
        while len(self._replicas) != count or not all(one.is_ready for one in self._replicas.values()):
            if time.monotonic() - self._asked_s > SCALING_S:
                words = f"{len(self._replicas)} replicas run, and {count} are wanted since {SCALING_S:g} s"
                raise EngineDead(words)
            await asyncio.sleep(RETRY_S)
        if adds:
            self.start_up_s = time.monotonic() - self._asked_s

    def delivered(self, own: OpenRequest, output: Output) -> None:
        """Note an output of a request."""
        self.load.delivered(own, output.num_cached_tokens)

    def ended(self, own: OpenRequest) -> None:
        """Note the end of a request."""
        self.load.ended(own)

    # As whatever carries the calls uses it

    def set_present(self, names: Collection[str]) -> None:
        """Note the replicas that new requests may be sent to. Others end what they have, or are lost."""
        for name, replica in [*self._replicas.items()]:
            if name not in names:
                replica.is_present = False
                del self._replicas[name]
                self._router.set_health(replica.key, "gone")
        for name in names:
            if name not in self._replicas:
                taken = {one.number for one in self._replicas.values()}
                number = next(number for number in count() if number not in taken)
                replica = self._replicas[name] = CalledReplica(number, self._router.add_replica())
                self._router.set_health(replica.key, "restarting")
                self._spawn(self._follow(name, replica))
        self._sum_up()
        self._ready.note(any(one.is_ready for one in self._replicas.values()))

    def choose(self, request_id: str, among: Collection[str]) -> str | None:
        """Return the replica of those in `among` that a request is sent to; None while none is ready."""
        ready = {one.key: name for name, one in self._replicas.items() if name in among and one.is_ready}
        ask = self._asks.get(request_id)
        if not ready or ask is None:
            return None
        decision = self._router.choose(ask, [*ready])
        numbers = {one.key: one.number for one in self._replicas.values()}
        self.decisions.add(ask._replace(request_id=given(request_id)), decision, numbers)
        return ready[decision.replica]

    def sent(self, request_id: str, there: str) -> None:
        """Note that the call for a request was made to a replica."""
        own, replica = self._requests.get(given(request_id)), self._replicas.get(there)
        if own is None or replica is None:
            return
        own.replica, own.sent = replica.number, True
        own.take_fingerprint(replica.status.facts.fingerprint)
        self._calling[own.request.request_id] = there, request_id

    # Requests

    async def _run(self, own: OpenRequest) -> None:
        """Run a request until it ends, on one replica after the other if they are lost."""
        request_id = own.request.request_id
        for number in count():
            if not await self._ready.found(forever=number > 0):
                problem = "no replica became ready"
                self._requests.fail(request_id, EngineDead(problem, "send the request again in a moment"))
                return
            problem, alone = await self._try(own, f"{self._name}-{number}-{request_id}")
            if not own.ended:
                now = time.monotonic()
                own.lose_engine(now, died=True, alone=alone)
                self._deliver(own, own.aborted_outputs(now))
            if not own.ended and own.kills:
                hint = f"{MAX_DEATHS} engines died while they computed it alone: do not send it again"
                self._requests.fail(request_id, EngineDead(problem, hint, retry=False))
            if own.ended:
                return
            _LOG.warning("a request goes on: %s", problem)
            await asyncio.sleep(RETRY_S)

    def _note_end(self, request_id: str) -> None:
        del self._running[request_id]
        self.status.has_work = bool(self._requests)

    async def _try(self, own: OpenRequest, name: str) -> LostCall:
        """Run a request on a replica; return what prevented its end."""
        request = replace(own.continued(), request_id=name)
        limits = self.status.facts.limits
        hashes = prompt_hashes(request, limits.block_size)
        self._asks[name] = Ask(name, hashes, len(request.prompt_token_ids), time.monotonic())
        try:
            call = bytes(messages.encode(Call(request, own.num_deaths, own.num_deaths_alone)))
            async with aclosing(self._calls.generate(name, call, self._host, time.monotonic())) as answer:
                return LostCall(await self._read(own, name, answer))
        except messages.BadFrame as bad:
            error = RequestError(f"the request is {bad}", "shorten the prompt", "prompt")
            self._requests.fail(own.request.request_id, error)
            return LostCall(error.message)
        except Exception as error:
            lost = self._suspend(own)
            own.exposed = own.sent and lost is not None  # one that is gone was stopped on purpose
            problem = f"the replica is lost: {type(error).__name__}: {str(error)[:200]}"
            return LostCall(problem, lost is not None and lost.num_lost == 1)
        finally:
            self._asks.pop(name, None)
            self._calling.pop(own.request.request_id, None)
            self._router.ended(name)

    async def _read(self, own: OpenRequest, name: str, answer: AsyncGenerator[bytes, None]) -> str:
        """Take in the answer of a replica until the request ends; return what prevented its end."""
        reader = answer_reader()
        async for data in answer:
            for message in reader.feed(data):
                if isinstance(message, RequestLost):
                    own.num_deaths, own.num_deaths_alone = message.num_deaths, message.num_deaths_alone
                    self._suspend(own)
                    return message.problem
                self._take_answer(own, name, message)
            if own.ended:
                break
        return "the replica ended early"

    def _take_answer(self, own: OpenRequest, name: str, message: Answer) -> None:
        match message:
            case messages.Stepped(outputs, _):
                if name in self._asks:
                    del self._asks[name]
                    self._router.started(name, outputs[0].num_cached_tokens)
                self._deliver(own, outputs)
            case messages.RequestRefused():
                self._refuse(own.request.request_id, message.error())

    def _deliver(self, own: OpenRequest, outputs: list[Output]) -> None:
        """Deliver outputs under the id that the request has here, of sequences that have not ended."""
        request_id = own.request.request_id
        open_ones = [output for output in outputs if not own.sequences[output.sequence].ended]
        self._requests.deliver([output._replace(request_id=request_id) for output in open_ones])

    async def _abort(self, own: OpenRequest, there: str, name: str, sequence: int | None) -> None:
        try:
            await self._calls.abort(there, name, sequence)
        except Exception:  # the replica is lost, or ends what it has: whoever runs the request ends the call
            self._deliver(own, own.aborted_outputs(time.monotonic()))
            if own.ended and (running := self._running.get(own.request.request_id)) is not None:
                running.cancel()

    def _suspend(self, own: OpenRequest) -> CalledReplica | None:
        """Send nothing to the replica that a request was lost with, until it tells that it is ready.

        Return it, or None if it is gone.
        """
        there, _ = self._calling.get(own.request.request_id, ("", ""))
        if (replica := self._replicas.get(there)) is not None:
            self._set_restarting(there, replica)
        return replica

    # Replicas

    async def _follow(self, name: str, replica: CalledReplica) -> None:
        """Take in the news of a replica for as long as new requests are sent there."""
        reader = news_reader()
        while replica.is_present:
            watched = self._watched and replica.number == min(one.number for one in self._replicas.values())
            try:
                data = await self._calls.poll(name, self._name, watched, replica.is_ready, self.wanted)
                for message in reader.feed(data):
                    self._take(name, replica, message)
            except Exception as error:
                _LOG.warning("a replica does not answer: %s", type(error).__name__)
                reader = news_reader()  # what it has of that answer would be read again
                self._set_restarting(name, replica)
                await asyncio.sleep(RETRY_S)

    def _take(self, name: str, replica: CalledReplica, message: News) -> None:
        match message:
            case ReplicaReady(facts):
                replica.status.take_facts(facts)
                replica.status.num_restarts = message.num_restarts
                replica.status.pid, replica.host = message.pid, message.host
                if self.status.state == "starting":
                    self.status.take_facts(facts)
                self._set_state(replica, "ready")
            case ReplicaUnready():
                self._set_restarting(name, replica)
            case messages.Stepped(_, report) if report is not None:
                self._take_report(replica, report)

    def _set_restarting(self, name: str, replica: CalledReplica) -> None:
        if replica.status.state == "ready":
            replica.num_lost = sum(there == name for there, _ in self._calling.values())
        self._set_state(replica, "restarting")

    def _set_state(self, replica: CalledReplica, state: Literal["ready", "restarting"]) -> None:
        replica.status.state = state
        if replica.is_present:
            self._router.set_health(replica.key, state)
        self._sum_up()
        self._ready.note(any(one.is_ready for one in self._replicas.values()))

    def _take_report(self, replica: CalledReplica, report: StepReport) -> None:
        replica.status.take_report(report)
        self._router.take_report(replica.key, report)
        if report.view is not None:
            report = report._replace(view=named(report.view, f"{self._name}-"))
        self._take_step([], report._replace(replica=replica.number))
        self._sum_up()

    def _sum_up(self) -> None:
        """Note in the own status what replicas report together."""
        statuses = [one.status for one in self._replicas.values()]
        self.status.num_running = sum(one.num_running for one in statuses)
        self.status.num_waiting = sum(one.num_waiting for one in statuses)
        self.status.num_free_blocks = min(
            (one.num_free_blocks for one in statuses if one.num_blocks), default=self.status.num_blocks
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task outside the context of the HTTP request that asked for it."""
        task = self._loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
