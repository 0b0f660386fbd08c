"""Several engines as a server sees them, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.cluster.decisions import DecisionLog
from quire.cluster.operations import Operations
from quire.engine.status import EngineStatus
from quire.routing.load_counts import LoadCounts

if TYPE_CHECKING:
    from quire.cluster.autoscaling import Autoscaler
    from quire.cluster.replicas import Replicas


class ShownReplica(NamedTuple):
    """A replica as it is shown to users: its status, and where it is.

    `processors` and `nodes` are those of its place on this machine, `host` and `name` those that whatever
    runs it elsewhere has for it.
    """

    number: int
    status: EngineStatus
    health: str
    num_open: int
    processors: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    host: str | None = None
    name: str | None = None


class Several(Protocol):
    """Several engines with a router.

    `autoscaler` is None where their number does not follow the load, `own` where somebody else starts and
    ends them.
    """

    decisions: DecisionLog
    load: LoadCounts
    operations: Operations
    autoscaler: Autoscaler | None

    @property
    def own(self) -> Replicas | None:
        """The replicas, for operations on them."""

    @property
    def num_places(self) -> int:
        """The number of replicas that can run."""

    def shown(self) -> Sequence[ShownReplica]:
        """Return all replicas, by number."""
