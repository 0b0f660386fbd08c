"""The interface of routers: which replica gets a request. Pure: the same calls, the same choices.

One router runs live (quire/cluster), in a simulation, and in a Ray deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from quire.engine.request import prompt_hashes
from quire.engine.status import CacheChanges, StepReport
from quire.types import NewRequest

Health = Literal["ready", "slow", "draining", "restarting", "gone"]
# Why a choice took no account of cached blocks: the prompt has no full block, no replica has any of them, the
# replicas with them were worse choices, or what the replicas have is not known.
NoAffinity = Literal["", "short prompt", "nothing cached", "busier", "unknown"]


class Ask(NamedTuple):
    """The part of a request that routers look at: the hashes of its full prompt blocks, and its size."""

    request_id: str
    hashes: tuple[bytes, ...]  # of the blocks that may be found in a cache, in order
    num_prompt_tokens: int
    at_s: float

    @classmethod
    def of(cls, new: NewRequest, block_size: int) -> Ask:
        """Return what routers look at of a request, with its hashes as the scheduler computes them."""
        hashes = prompt_hashes(new, block_size)
        return cls(new.request_id, hashes, len(new.prompt_token_ids), new.arrival_s)


class Candidate(NamedTuple):
    """A replica as the router saw it when it chose. `ttft_s` is 0 from routers that predict nothing."""

    replica: int
    num_blocks: int  # leading blocks of the prompt that it is believed to have
    ttft_s: float  # predicted, with penalties for its health
    health: Health


class Decision(NamedTuple):
    """A choice, with the alternatives, the chosen one among them: of many replicas only the best few."""

    replica: int
    candidates: tuple[Candidate, ...]
    no_affinity: NoAffinity


class Router(Protocol):
    """Chooses replicas, which are numbered from 0 in the order in which they were added, never reused."""

    def add_replica(self) -> int:
        """Add a replica with nothing cached; return its number."""

    def set_health(self, replica: int, health: Health) -> None:
        """Note the health of a replica. One that is "gone" is never chosen again and is forgotten."""

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        """Choose a replica, of those in `among` if given, and note that the request was sent there.

        Raises EngineDead if there is none.
        """

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        """Note the first output of a request."""

    def ended(self, request_id: str) -> None:
        """Note the end of a request, however it ended. Unknown ones are ignored."""

    def take_report(self, replica: int, report: StepReport) -> None:
        """Take in the report of a step of a replica, with the changes of its cache."""

    def take_changes(self, replica: int, changes: CacheChanges) -> None:
        """Take in changes of the cache of a replica."""
