"""The replicas of a router: their health, and the requests that each was sent and has not answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.forecast import Work
from quire.engine.status import CacheChanges, StepReport
from quire.errors import EngineDead
from quire.routing.router import Ask, Health

NO_WORK = Work(0, 0)


@dataclass(slots=True, eq=False)
class Sent:
    """A request that a replica was sent. `num_cached_tokens` are believed to be cached there.

    `keys` are those of its blocks, for routers that look at them.
    """

    ask: Ask
    replica: int
    keys: Sequence[int] = ()
    num_cached_tokens: int = 0
    has_started: bool = False
    started_s: float = 0.0  # on the clock of who cares

    @property
    def work(self) -> Work:
        """The work of the replica before the first token."""
        return Work(1, self.ask.num_prompt_tokens - self.num_cached_tokens, self.num_cached_tokens)


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """The load of a replica: its open requests, in sums."""

    health: Health = "ready"
    num_open: int = 0
    queued: Work = NO_WORK  # of requests without a first output
    num_context: int = 0  # tokens of the prompts of the others


@dataclass(slots=True, eq=False)
class Loads:
    """Part of a router: it implements all of the protocol but `choose`, with what every router knows."""

    loads: dict[int, ReplicaLoad] = field(default_factory=dict)  # by replica
    sent: dict[str, Sent] = field(default_factory=dict)  # by request
    num_added: int = 0

    def add_replica(self) -> int:
        """See Router."""
        self.loads[self.num_added] = ReplicaLoad()
        self.num_added += 1
        return self.num_added - 1

    def set_health(self, replica: int, health: Health) -> None:
        """See Router."""
        if replica not in self.loads:
            return
        self.loads[replica].health = health
        if health == "gone":
            del self.loads[replica]
            self.sent = {name: sent for name, sent in self.sent.items() if sent.replica != replica}

    def able(self, among: Sequence[int] | None) -> list[int]:
        """Return the replicas to choose from, if possible ready ones. Raises EngineDead without one."""
        known = [*self.loads] if among is None else [one for one in among if one in self.loads]
        if not known:
            raise EngineDead("no replica is left", "send the request again in a moment")
        ready = [one for one in known if self.loads[one].health in ("ready", "slow")]
        return ready or known

    def note(self, sent: Sent) -> None:
        """Note that a request was sent."""
        self.ended(sent.ask.request_id)
        self.sent[sent.ask.request_id] = sent
        load = self.loads[sent.replica]
        load.num_open += 1
        load.queued += sent.work

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        """See Router."""
        if (sent := self.sent.get(request_id)) is not None and not sent.has_started:
            sent.has_started = True
            load = self.loads[sent.replica]
            load.queued -= sent.work
            load.num_context += sent.ask.num_prompt_tokens

    def ended(self, request_id: str) -> None:
        """See Router."""
        if (sent := self.sent.pop(request_id, None)) is not None:
            load = self.loads[sent.replica]
            load.num_open -= 1
            if sent.has_started:
                load.num_context -= sent.ask.num_prompt_tokens
            else:
                load.queued -= sent.work

    def take_report(self, replica: int, report: StepReport) -> None:
        """See Router."""

    def take_changes(self, replica: int, changes: CacheChanges) -> None:
        """See Router."""
