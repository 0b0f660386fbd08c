"""Replicas: several engines in processes of their own as one EngineClient, with a router between them.

Each replica has a *place*, its share of the machine's cores, and the number of that place, which stays the
same when its process is replaced. A request runs on the replica that the router chose. If that dies, or is
drained for longer than requests are waited for, the request goes on elsewhere, and its stream with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from quire.cluster.adapters import adapters_of, catch_up, change_all
from quire.cluster.decisions import DecisionLog
from quire.cluster.operations import Operations
from quire.cluster.placement import Place
from quire.cluster.several import ShownReplica
from quire.cluster.together import Together
from quire.engine.client import Stream
from quire.engine.open_request import OpenRequest
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, RequestError
from quire.routing.load_counts import LoadCounts
from quire.routing.router import Ask, Health, Router
from quire.routing.scaling import Observed
from quire.types import NewRequest, Output

if TYPE_CHECKING:
    from quire.cluster.autoscaling import Autoscaler
    from quire.server.remote import RemoteEngine

POLL_S = 0.02  # between two looks at a replica that is drained

MakeEngine = Callable[[Place], "RemoteEngine"]


@dataclass(slots=True, eq=False)
class PlacedEngine:
    """An engine in its place. `key` is its number in the router, which is never used again."""

    number: int
    place: Place
    engine: RemoteEngine
    key: int = -1
    health: Health = "restarting"  # as the router was told
    is_draining: bool = False
    started_s: float = field(default_factory=time.monotonic)

    @property
    def status(self) -> EngineStatus:
        return self.engine.status

    @property
    def serves(self) -> bool:
        return self.status.state == "ready" and not self.is_draining

    @property
    def health_in_words(self) -> str:
        """The health, and of an engine that is not ready its state."""
        health, state = self.state(time.monotonic()), self.status.state
        return state if health == "restarting" else health

    def state(self, now: float) -> Health:
        """Return the health as it is now."""
        if self.is_draining:
            return "draining"
        if self.status.state != "ready":
            return "restarting"
        return "ready" if self.engine.healthy(now) is None else "slow"


class Replicas:
    """An EngineClient over at most one engine for each place, made by `make`; at first one for each, or as
    few as an autoscaler allows.

    A replica that is drained gets no new requests; after `drain_s` those that are still open go on elsewhere.
    """

    def __init__(
        self,
        make: MakeEngine,
        places: Sequence[Place],
        router: Router,
        *,
        block_size: int,
        drain_s: float,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self.places = tuple(places)
        self.decisions = DecisionLog()
        self.on_record: Callable[[StepReport], None] | None = None
        self._make = make
        self._router = router
        self._block_size = block_size
        self._drain_s = drain_s
        self._replicas: dict[int, PlacedEngine] = {}  # those that were ready once, by number, in order
        self._starting: dict[int, PlacedEngine] = {}
        self._by_key: dict[int, PlacedEngine] = {}
        self._together = Together()
        self._open: dict[str, bool] = {}  # requests, and whether each has an output of its replica
        self._watched = False
        self._closed = False
        self._changing_adapters = asyncio.Lock()  # also while a replica joins those that serve
        self.operations = Operations()
        self.autoscaler = autoscaler
        self.load = LoadCounts()
        self.start_up_s = 0.0  # of the replica that started last

    @property
    def numbers(self) -> list[int]:
        """The replicas that run, also while they are drained or restarted; not those that were given up."""
        return [number for number, status in self.statuses.items() if status.state != "stopped"]

    def _in_order(self) -> list[PlacedEngine]:
        return sorted(dict(self._replicas).values(), key=lambda one: one.status.state == "stopped")

    def _running(self) -> list[RemoteEngine]:
        return [self._replicas[number].engine for number in self.numbers]

    def all(self) -> list[PlacedEngine]:
        """Return all replicas, those that start for the first time among them, by number."""
        return sorted([*self._replicas.values(), *self._starting.values()], key=lambda one: one.number)

    @property
    def own(self) -> Replicas:
        return self

    @property
    def num_places(self) -> int:
        return len(self.places)

    def shown(self) -> list[ShownReplica]:
        return [
            ShownReplica(
                one.number,
                one.status,
                one.health_in_words,
                one.engine.num_open,
                one.place.processors,
                one.place.nodes,
            )
            for one in self.all()
        ]

    def serves_without(self, number: int) -> bool:
        """Return True if another replica than this one serves."""
        return any(one.serves for one in self._replicas.values() if one.number != number)

    # The EngineClient

    @property
    def status(self) -> EngineStatus:
        """The status of all replicas together; the law, and facts other than sums, are those of the first."""
        statuses = {f"{one.number}: {one.place.words}": one.status for one in self._in_order()}
        self._together.take_statuses(statuses, self._closed)
        return self._together

    @property
    def statuses(self) -> Mapping[int, EngineStatus]:
        """Return those of all by number, those given up last. Any thread may ask, also during a removal."""
        return {replica.number: replica.status for replica in self._in_order()}

    def submit(self, request: NewRequest) -> Stream:
        """Send a request to the replica that the router chooses. See EngineClient."""
        if request.request_id in self._open:
            hint = "give every open request its own id"
            raise RequestError(f"request id {request.request_id!r} is in use", hint, "request_id")
        ask = Ask.of(request, self._block_size)
        refused: list[PlacedEngine] = []
        while candidates := self._candidates(refused):
            replica = self._choose(ask, candidates)
            try:
                stream = replica.engine.submit(request)
                self.load.arrived(request.request_id, len(request.prompt_token_ids))
                return stream
            except EngineDead:
                refused.append(replica)
                self._forget(request.request_id)
            except RequestError:
                self._forget(request.request_id)
                raise
        problem = self.healthy(time.monotonic()) or "no replica takes requests"
        raise EngineDead(problem, "send the request again in a moment")

    async def change_adapter(self, name: str, path: str | None) -> None:
        """See quire.server.adapter_changes. If one replica cannot load it, none keeps it."""
        async with self._changing_adapters:
            await change_all(self._running(), name, path)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        for replica in self._replicas.values():
            replica.engine.abort(request_id, sequence)

    def watch(self, on: bool) -> None:
        """Ask the first replica for views: one is watched at a time."""
        self._watched = on
        self._watch_first()

    def healthy(self, now: float) -> str | None:
        """Return None if any replica serves, or the reason why the first does not."""
        problems = [replica.engine.healthy(now) for replica in self._replicas.values()]
        if not problems:
            return "no replica runs"
        return None if None in problems else problems[0]

    async def close(self) -> None:
        self._closed = True
        if self.autoscaler is not None:
            await self.autoscaler.close()
        await self.operations.close()
        await asyncio.gather(*(replica.engine.close() for replica in self.all()))

    def observed(self, at_s: float) -> Observed:
        """Return the load, and how many replicas there are, as a scaler sees them."""
        now = time.monotonic()
        starting_s = [max(0.0, one.started_s + self.start_up_s - now) for one in self._starting.values()]
        both = [one for one in self._replicas.values() if not one.is_draining]
        starting_s += [self.start_up_s for one in both if one.status.state == "restarting"]
        return self.load.observed(at_s, sum(one.serves for one in both), tuple(starting_s))

    # What replicas tell

    def delivered(self, own: OpenRequest, output: Output) -> None:
        """Note an output of a request."""
        request_id = own.request.request_id
        self.load.delivered(own, output.num_cached_tokens)
        if not self._open.get(request_id, True):
            self._open[request_id] = True
            self._router.started(request_id, output.num_cached_tokens)

    def ended(self, own: OpenRequest) -> None:
        """Note the end of a request."""
        self.load.ended(own)
        self._forget(own.request.request_id)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._router.ended(request_id)

    def _take_report(self, replica: PlacedEngine, report: StepReport) -> None:
        self._router.take_report(replica.key, report)
        self._together.take_report(report)
        if self.on_record is not None:
            self.on_record(report)

    def _take_lost(self, replica: PlacedEngine, lost: list[OpenRequest]) -> None:
        """Go on elsewhere with the requests of a replica that died, or there when it is ready again."""
        self._tell_health(time.monotonic())
        self._watch_first()
        for own in lost:
            self._move(own, replica)

    # Routing

    def _candidates(self, besides: Sequence[PlacedEngine] = ()) -> list[PlacedEngine]:
        """Return the replicas that may get a request: those drained only if there are no others."""
        now = time.monotonic()
        self._tell_health(now)
        found = [one for one in self._replicas.values() if one not in besides and one.status.state == "ready"]
        return [one for one in found if one.serves] or found

    def _restarting(self, besides: Sequence[PlacedEngine]) -> list[PlacedEngine]:
        """Return the replicas that serve, or will."""
        return [
            one
            for one in self._replicas.values()
            if one not in besides and one.status.state in ("ready", "restarting")
        ]

    def _tell_health(self, now: float) -> None:
        for replica in self._replicas.values():
            if (health := replica.state(now)) != replica.health:
                replica.health = health
                self._router.set_health(replica.key, health)

    def _choose(self, ask: Ask, candidates: Sequence[PlacedEngine]) -> PlacedEngine:
        decision = self._router.choose(ask, [replica.key for replica in candidates])
        replica = self._by_key[decision.replica]
        self._open[ask.request_id] = False
        numbers = {key: one.number for key, one in self._by_key.items()}
        self.decisions.add(ask, decision, numbers)
        return replica

    def _move(self, own: OpenRequest, before: PlacedEngine) -> None:
        """Go on with a request elsewhere, or where it was if nobody else serves and that starts again."""
        self._forget(own.request.request_id)
        ask = Ask.of(own.request, self._block_size)
        besides: list[PlacedEngine] = []
        while candidates := self._candidates([*besides, before]) or self._restarting(besides):
            replica = self._choose(ask, candidates)
            try:
                replica.engine.adopt(own)
                return
            except EngineDead:
                besides.append(replica)
                self._forget(own.request.request_id)
        self.load.ended(own)
        own.fail(EngineDead("no replica is left", "send the request again in a moment"))

    # Starting, draining, replacing

    async def start(self) -> None:
        """Start the first replica, and then the others together, or with an autoscaler as few as it allows.

        Raises ConfigError or EngineDead.

        What takes a machine once, such as packing weights and measuring, is done by the first alone.
        """
        await self._start(0)
        count = len(self.places) if self.autoscaler is None else self.autoscaler.least
        await asyncio.gather(*map(self._start, range(1, count)))
        if self.autoscaler is not None:
            self.autoscaler.begin(self)

    async def scale(self, count: int) -> None:
        """Let so many replicas run: start them in free places, or drain and stop those numbered highest.

        Those that were given up go first. Raises ConfigError or EngineDead for one that does not start.
        """
        runs = self.numbers
        for number in [*(self._replicas.keys() - runs), *reversed(runs[count:])]:
            await self._stop(number)
        free = [number for number in range(len(self.places)) if number not in self._replicas]
        free = free[: max(0, count - len(self._replicas))]
        ended = await asyncio.gather(*map(self._start, free), return_exceptions=True)
        if failures := [one for one in ended if one is not None]:  # the others have started by now
            raise failures[0]

    async def restart(self, numbers: Sequence[int]) -> None:
        """Replace the processes of these replicas, one after the other: drain, stop, start.

        Raises ConfigError or EngineDead for one that does not start; those after it stay as they are.
        """
        for number in numbers:
            if number in self._replicas:
                await self._stop(number)
            await self._start(number)

    async def _start(self, number: int) -> None:
        place = self.places[number]
        replica = PlacedEngine(number, place, self._make(place))
        engine = replica.engine
        engine.replica = number
        engine.on_record = partial(self._take_report, replica)
        engine.on_lost = partial(self._take_lost, replica)
        engine.observe(self)
        engine.follow_cache(True)
        given = engine.adapters.paths = adapters_of(self._running())
        replica.key = self._router.add_replica()
        self._by_key[replica.key] = self._starting[number] = replica
        self._router.set_health(replica.key, replica.health)
        try:
            await engine.start()
            async with self._changing_adapters:
                await catch_up(engine, given, adapters_of(self._running()))
                self._replicas = dict(sorted({**self._replicas, number: replica}.items()))
        except BaseException:
            self._drop(replica)
            await engine.close()
            raise
        finally:
            del self._starting[number]
        self.start_up_s = time.monotonic() - replica.started_s
        facts = engine.status.facts
        self._router.take_report(replica.key, StepReport(None, 0, 0, facts.limits.num_blocks, facts.law))
        self._watch_first()

    async def _stop(self, number: int) -> None:
        """Drain a replica and end its process. No request ends by that: others must serve meanwhile."""
        replica = self._replicas[number]
        replica.is_draining = True
        end_s = time.monotonic() + self._drain_s
        while not self._closed:
            is_done = not replica.engine.num_open or time.monotonic() >= end_s
            if is_done and (self.serves_without(number) or replica.status.state == "stopped"):
                break
            if not self._restarting([replica]) and replica.status.state != "stopped":
                replica.is_draining = False
                words = f"replica {number} goes on: no other one serves, or will without being replaced"
                raise EngineDead(words, "replace those that are stopped: POST /replicas/N/restart")
            await asyncio.sleep(POLL_S)
        del self._replicas[number]
        for own in replica.engine.hand_over():
            self._move(own, replica)
        self._drop(replica)
        self._together.num_past_restarts += replica.status.num_restarts
        self._watch_first()
        await replica.engine.close()

    def _drop(self, replica: PlacedEngine) -> None:
        del self._by_key[replica.key]
        self._router.set_health(replica.key, "gone")

    def _watch_first(self) -> None:
        for index, replica in enumerate(self._in_order()):
            replica.engine.watch(self._watched and index == 0)
