"""A fleet: several simulated replicas behind one router, with starts, drains, deaths and scaling.

The router and the scaler are those of quire/routing, called as live replicas would call them. Each replica
runs on a clock of its own, and a queue of events brings what they do into one order: the end of a step, whose
outputs reach clients and whose report reaches the router; an arrival; blocks of a prompt that have moved; a
replica that is ready, or dies; a look at the load. What `simulate` runs is a fleet of one replica without a
router.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire.engine.engine import validate
from quire.engine.scheduler import Scheduler
from quire.engine.status import StepReport
from quire.engine.step_law import StepLaw
from quire.errors import RequestError
from quire.routing.router import Ask, Router
from quire.routing.scaling import Scaler
from quire.simulation.apart import Apart, first_token_of, going_on, load_prompt
from quire.simulation.clients import Clients
from quire.simulation.replica import Replica, State
from quire.types import NewRequest, Output

Act = Callable[[float], None]  # what happens at a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The number of replicas, and what becomes of them.

    `num_replicas` are ready at the beginning; one that is started later takes `start_up_s`. At each moment of
    `deaths_s` a random replica dies, of those with open requests if there are any; another one is started,
    and the requests go on elsewhere. A `scaler` is asked every `scaler.interval_s`; its answers are bounded
    by `least` and `most`. With `apart` some compute prompts only: then none dies, and their number is fixed.
    """

    num_replicas: int = 1
    start_up_s: float = 0.0
    deaths_s: tuple[float, ...] = ()
    seed: int = 0
    scaler: Scaler | None = None
    least: int = 1
    most: int = 1
    apart: Apart | None = None
    num_records: int = 4096  # of the last steps, kept by each replica


class ReplicaCounts(NamedTuple):
    """Replicas by their state from a moment on."""

    at_s: float
    num_ready: int
    num_starting: int
    num_draining: int


class Choice(NamedTuple):
    """A request was sent to a replica, by its router's number: at its arrival, or when another one died."""

    at_s: float
    request_id: str
    replica: int


@dataclass(slots=True)
class FleetLog:
    """The history of the replicas of a run."""

    counts: list[ReplicaCounts] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)  # of the router
    num_deaths: int = 0
    num_resumed: int = 0  # requests that went on elsewhere
    num_without_affinity: Counter[str] = field(default_factory=Counter)  # decisions, by reason


class Fleet:
    """Replicas, and requests on their way between them and the clients.

    `scheduler` makes the scheduler of a replica. Without a router requests go to the first replica.
    """

    def __init__(
        self,
        plan: FleetPlan,
        clients: Clients,
        scheduler: Callable[[], Scheduler],
        law: StepLaw,
        router: Router | None = None,
    ) -> None:
        self.plan, self.clients, self.log = plan, clients, FleetLog()
        self.replicas: list[Replica] = []  # in the order in which they were started
        self._make_scheduler, self._law, self._router = scheduler, law, router
        self._by_number: list[Replica] = []  # those that were ready, as the router numbers them
        self._events: list[tuple[float, int, Act]] = []  # a heap; those of one moment in order
        self._num_in: Counter[State] = Counter()  # replicas by state
        self._num_events = 0
        self._num_busy = 0
        self._num_wanted = plan.num_replicas
        self._unsent: list[NewRequest] = []  # while no replica is ready
        self._dice = random.Random(plan.seed)
        for _ in range(plan.num_replicas):
            self._get_ready(self._start(0.0), 0.0)
        for at_s in plan.deaths_s:
            self._at(at_s, self._kill_one)
        if plan.scaler is not None:
            self._at(plan.scaler.interval_s, self._look)

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return self._num_in["ready"]

    def run(self, num_first: int | None = None) -> None:
        """Run until all requests have ended, or the first `num_first`."""
        clients, events = self.clients, self._events
        while num_first is None or not clients.have_ended(num_first):
            arrival_s = clients.next_s
            if arrival_s is None and not clients.num_open and not self._num_busy:
                break
            if events and (arrival_s is None or events[0][0] <= arrival_s):
                at_s, _, act = heapq.heappop(events)
                act(at_s)
            elif arrival_s is not None:
                self._take_arrivals(arrival_s)
            else:
                raise RuntimeError("requests are open, and nothing is going to happen")

    def _at(self, at_s: float, act: Act) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, act))

    # Requests

    def _send_all(self, requests: Iterable[NewRequest], now_s: float) -> None:
        woken: list[Replica] = []
        for new in requests:
            self._send(new, now_s, woken)
        self._wake(woken, now_s)

    def _take_arrivals(self, now_s: float) -> None:
        """Send all requests that have arrived by now to replicas."""
        clients, woken = self.clients, list[Replica]()
        while (next_s := clients.next_s) is not None and next_s <= now_s:
            new = clients.take()
            if clients.queue(new, self.num_ready):
                self._send(new, now_s, woken)
        self._wake(woken, now_s)

    def _send(self, new: NewRequest, now_s: float, woken: list[Replica]) -> None:
        """Give a request to a replica, added to `woken` if it was idle; or keep it until one is ready."""
        if not self.num_ready:
            self._unsent.append(new)
            return
        apart = self.plan.apart
        sent = apart is not None and apart.is_sent(new)
        replica = self._choose(new, now_s) if sent or apart is None else self._least_open()
        try:
            if sent:
                validate(new, replica.engine.scheduler)
            replica.add(first_token_of(new) if sent else new)
            replica.open[new.request_id] = new
        except RequestError as error:
            self.clients.refuse(new, error)
            if self._router is not None:
                self._router.ended(new.request_id)
            return
        self._occupy(replica, woken)

    def _occupy(self, replica: Replica, woken: list[Replica]) -> None:
        """Note that a replica has work; add it to `woken` if it was idle."""
        if not replica.is_busy:
            replica.is_busy = True
            self._num_busy += 1
            woken.append(replica)

    def _least_open(self) -> Replica:
        """Return the replica with the fewest open requests, of those that do not compute prompts only."""
        assert self.plan.apart is not None
        return min(self._by_number[self.plan.apart.num_prefill :], key=lambda one: len(one.open))

    def _hand_on(self, source: Replica, outputs: Sequence[Output], now_s: float) -> None:
        """Send the blocks of prompts that were computed to the replicas that go on."""
        apart = self.plan.apart
        assert apart is not None
        for output in outputs:
            new = source.open[output.request_id]
            if output.finish_reason == "length":
                target = self._least_open()
                target.open[new.request_id] = new  # counts from now on
                self._at(apart.move(new, source, target, now_s), partial(self._go_on, target, new))

    def _go_on(self, replica: Replica, new: NewRequest, now_s: float) -> None:
        """Let a replica go on after the prompt of a request, the blocks of which have arrived."""
        resumed, woken = self.clients.resume(new), list[Replica]()
        load_prompt(replica, resumed)
        replica.add(resumed)
        self._occupy(replica, woken)
        self._wake(woken, now_s)

    def _choose(self, new: NewRequest, now_s: float) -> Replica:
        if self._router is None:
            return next(replica for replica in self._by_number if replica.state == "ready")
        block_size = self._by_number[0].engine.scheduler.block_size
        among = None if self.plan.apart is None else range(self.plan.apart.num_prefill)
        decision = self._router.choose(Ask.of(new, block_size)._replace(at_s=now_s), among)
        self.log.choices.append(Choice(now_s, new.request_id, decision.replica))
        if decision.no_affinity:
            self.log.num_without_affinity[decision.no_affinity] += 1
        return self._by_number[decision.replica]

    def find(self, replica: int, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain a replica has cached, by its router's number."""
        pools = self._by_number[replica].engine.scheduler.caches.whole
        for index, block_hash in enumerate(hashes):
            if any(pool.find(block_hash) is None for pool in pools):
                return index
        return len(hashes)

    def _wake(self, woken: list[Replica], now_s: float) -> None:
        """Let replicas that got work while they were idle begin a step, when all of it is there."""
        for replica in woken:
            self._begin_step(replica, now_s)

    def _begin_step(self, replica: Replica, now_s: float) -> None:
        """Let a replica begin its next step, if it has work."""
        end_s = replica.begin_step(now_s)
        if end_s is not None:
            self._at(end_s, partial(self._end_step, replica))
            return
        replica.is_busy = False
        self._num_busy -= 1
        if replica.state == "draining":
            self._change(replica, "gone", now_s)

    def _end_step(self, replica: Replica, now_s: float) -> None:
        """Pass on what a step gave, take what has arrived meanwhile, and begin the next one."""
        if replica.state == "gone":
            return
        outputs, report = replica.end_step()
        opened, unstarted, router, apart = replica.open, replica.unstarted, self._router, self.plan.apart
        computes_prompts = apart is not None and replica.number < apart.num_prefill
        self.clients.receive(going_on(outputs) if computes_prompts else outputs, now_s)
        if computes_prompts:
            self._hand_on(replica, outputs, now_s)
        elif apart is not None:
            router = None  # it was not asked
        for output in outputs:
            name = output.request_id
            if unstarted and name in unstarted:
                unstarted.remove(name)
                if router is not None:
                    router.started(name, output.num_cached_tokens)
            if output.finish_reason is not None:
                del opened[name]
                if router is not None:
                    router.ended(name)
        if router is not None and report is not None:
            router.take_report(replica.number, report)
        self._take_arrivals(now_s)
        self._begin_step(replica, now_s)

    # Replicas

    def _start(self, now_s: float) -> Replica:
        replica = Replica(now_s)
        self._num_in["starting"] += 1
        self.replicas.append(replica)
        return replica

    def _get_ready(self, replica: Replica, now_s: float) -> None:
        """Let a replica that was started take requests, unless it is no longer wanted."""
        if replica.state != "starting":
            return
        scheduler = self._make_scheduler()
        self._change(replica, "ready", now_s)
        replica.get_ready(scheduler, self._law, now_s, self.plan.num_records)
        replica.number = len(self._by_number)
        self._by_number.append(replica)
        if self._router is not None:
            replica.engine.follow_cache(True)
            self._router.add_replica()
            report = StepReport(None, 0, 0, scheduler.num_free_blocks, self._law)
            self._router.take_report(replica.number, report)
        unsent, self._unsent = self._unsent, []
        self._send_all(unsent, now_s)

    def _change(self, replica: Replica, state: State, now_s: float) -> None:
        """Change the state of a replica, and tell the router of it."""
        self._num_in[replica.state] -= 1
        self._num_in[state] += 1
        replica.state = state
        if state == "gone":
            replica.gone_s = now_s
        if replica.number >= 0 and self._router is not None and state in ("draining", "gone"):
            self._router.set_health(replica.number, "gone" if state == "gone" else "draining")
        self._log_counts(now_s)

    def _log_counts(self, now_s: float) -> None:
        counts, num = self.log.counts, self._num_in
        if counts and counts[-1].at_s == now_s:
            counts.pop()
        new = ReplicaCounts(now_s, num["ready"], num["starting"], num["draining"])
        if not counts or counts[-1][1:] != new[1:]:
            counts.append(new)

    def _kill_one(self, now_s: float) -> None:
        """Let a random replica die."""
        alive = [one for one in self._by_number if one.state in ("ready", "draining")]
        if alive:
            self._kill(self._dice.choice([one for one in alive if one.open] or alive), now_s)

    def _kill(self, replica: Replica, now_s: float) -> None:
        """End a replica. What its step in progress would give is lost; its requests go on elsewhere."""
        if replica.is_busy:
            self._num_busy -= 1
        self._change(replica, "gone", now_s)
        replica.has_died = True
        self.log.num_deaths += 1
        self.log.num_resumed += len(replica.open)
        if self._router is not None:
            for name in replica.open:
                self._router.ended(name)
        self._reach(self._num_wanted, now_s)
        self._send_all([self.clients.resume(new) for new in replica.open.values()], now_s)

    def _reach(self, wanted: int, now_s: float) -> None:
        """Start replicas, or drain some, so that `wanted` remain; those that start yet are given up first."""
        self._num_wanted = wanted
        while self._num_in["ready"] + self._num_in["starting"] < wanted:
            self._at(now_s + self.plan.start_up_s, partial(self._get_ready, self._start(now_s)))
        surplus = self._num_in["ready"] + self._num_in["starting"] - wanted
        if surplus <= 0:
            self._log_counts(now_s)
            return
        leaving = [one for one in reversed(self.replicas) if one.state == "starting"]
        ready = [one for one in self._by_number if one.state == "ready"]
        leaving += sorted(ready, key=lambda one: (len(one.open), -one.number))
        for replica in leaving[:surplus]:
            idle = replica.state == "starting" or not replica.is_busy
            self._change(replica, "gone" if idle else "draining", now_s)

    def _look(self, now_s: float) -> None:
        """Ask the scaler."""
        plan, scaler = self.plan, self.plan.scaler
        assert scaler is not None
        ready_s = [one.started_s + plan.start_up_s for one in self.replicas if one.state == "starting"]
        starting_s = tuple([at_s - now_s for at_s in ready_s])
        observed = self.clients.observed(now_s, self.num_ready, starting_s)
        self._reach(min(max(scaler.target(observed), plan.least), plan.most), now_s)
        self._at(now_s + scaler.interval_s, self._look)
