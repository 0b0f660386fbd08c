"""The endpoints of `--replicas`: what runs, how many, their replacement, and what the router decided."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import Conflict, RequestError
from quire.server.admin import reply, service_of
from quire.server.errors import NotFound
from quire.server.openapi import describes
from quire.server.request import read
from quire.server.steps import last_of

if TYPE_CHECKING:
    from quire.cluster.autoscaling import Autoscaler
    from quire.cluster.decisions import Routed
    from quire.cluster.replicas import Replicas
    from quire.cluster.several import Several, ShownReplica


class ReplicaCard(msgspec.Struct):
    """A replica: its place, its health as the router sees it, and the counters of its engine.

    `health` is ready, slow, draining, restarting, starting or stopped. On Ray a replica has no place, but a
    `name` there and a `host`; they are null otherwise.
    """

    number: int
    name: str | None
    host: str | None
    cpus: list[int]
    nodes: list[int]
    health: str
    pid: int | None
    num_open: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_restarts: int


class OperationCard(msgspec.Struct):
    """An operation on replicas. `seconds` is null while it runs; `error` says why it failed."""

    what: str
    seconds: float | None
    error: str | None


class ChangeCard(msgspec.Struct):
    """A change of the number of replicas that the load was the reason for."""

    age_s: float
    before: int
    after: int
    reason: str


class AutoscalingCard(msgspec.Struct):
    """The range of the number of replicas, the goal (seconds; null: no limit), and the last changes.

    The oldest change comes first.
    """

    least: int
    most: int
    ttft_goal_s: float | None
    itl_goal_s: float | None
    changes: list[ChangeCard]


class ReplicaList(msgspec.Struct):
    """The replicas that run, how many can, and the operation that runs or ran last.

    `autoscaling` is null where their number does not follow the load.
    """

    replicas: list[ReplicaCard]
    num_places: int
    operation: OperationCard | None
    autoscaling: AutoscalingCard | None


class ScaleRequest(msgspec.Struct):
    """The number of replicas that are to run."""

    count: int


class RoutedCard(msgspec.Struct):
    """A decision of the router. `request` is the tag that x-quire-tag has.

    Of the `num_prompt_blocks` full blocks of the prompt, the chosen replica was believed to have
    `num_blocks`; `no_affinity` says why that did not count, if it did not. `candidates` are what it chose
    from.
    """

    age_s: float
    request: str
    replica: int
    num_prompt_tokens: int
    num_prompt_blocks: int
    num_blocks: int
    no_affinity: str
    candidates: list[CandidateCard]


class CandidateCard(msgspec.Struct):
    """A replica as the router saw it; `ttft_s` is predicted, with penalties for its health."""

    replica: int
    num_blocks: int
    ttft_s: float | None
    health: str


class DecisionList(msgspec.Struct):
    """The last decisions, the oldest first. Of all of them, `num_by_reason` counts those that followed cached
    blocks ("affinity"), and the others by the reason.
    """

    num_decisions: int
    num_by_reason: dict[str, int]
    num_prompt_blocks: int
    num_matched_blocks: int
    decisions: list[RoutedCard]


@describes("List the replicas", reply=ReplicaList)
async def replicas(request: Request) -> Response:
    return reply(_listed(_replicas_of(request)))


@describes("Let so many replicas run", ScaleRequest, ReplicaList)
async def scale(request: Request) -> Response:
    """Start replicas in free places, or drain and stop those numbered highest; reply before that is done."""
    asked, *_ = await read(request, ScaleRequest, queued=False)
    several = _idle_replicas(request)
    if several.autoscaler is not None:
        hint = "start the server with one number of --replicas to choose it by requests"
        raise Conflict("the number of replicas follows the load", hint)
    most = len(several.places)
    if not 1 <= asked.count <= most:
        words = f"count must be from 1 to {most}: the cores were divided into that many places at the start"
        raise RequestError(words, None, "count")
    return _begin(several, f"scaling to {asked.count}", several.scale(asked.count))


@describes("Replace all replicas, one after the other", reply=ReplicaList)
async def restart_all(request: Request) -> Response:
    several = _idle_replicas(request)
    numbers = list(several.statuses)
    _check_others(several, numbers)
    return _begin(several, "restarting all replicas", several.restart(numbers))


@describes("Replace one replica", reply=ReplicaList)
async def restart(request: Request) -> Response:
    """Drain a replica, end its process, start another in its place; reply before that is done."""
    several = _idle_replicas(request)
    number = request.path_params["number"]
    if number not in several.statuses:
        raise NotFound(f"replica {number} does not run", f"these do: {', '.join(map(str, several.statuses))}")
    _check_others(several, [number])
    return _begin(several, f"restarting replica {number}", several.restart([number]))


@describes("List the last decisions of the router", reply=DecisionList)
async def decisions(request: Request) -> Response:
    """List `last` decisions. They contain numbers, and nothing of any request."""
    service, log = service_of(request), _replicas_of(request).decisions
    last = last_of(request.query_params.get("last"), log.last.maxlen or 0)
    kept = itertools.islice(log.last, max(0, len(log.last) - last), None)
    reasons: dict[str, int] = {}
    for (_, reason), count in log.num_by_reason.items():
        reasons[reason or "affinity"] = reasons.get(reason or "affinity", 0) + count
    now_s = time.time()
    return reply(
        DecisionList(
            num_decisions=log.num_by_reason.total(),
            num_by_reason=reasons,
            num_prompt_blocks=log.num_prompt_blocks,
            num_matched_blocks=log.num_matched_blocks,
            decisions=[_card(one, service.tag(one.request_id), now_s) for one in kept],
        )
    )


def _idle_replicas(request: Request) -> Replicas:
    """Return the replicas. Raises Conflict while an operation runs, or if they are not this server's."""
    several = _replicas_of(request).own
    if several is None:
        hint = "deploy it again: 'quire deploy ray' with another --replicas, or other flags, replaces them"
        raise Conflict("the replicas of this deployment are started and ended by Ray Serve", hint)
    several.operations.check()
    return several


def _replicas_of(request: Request) -> Several:
    replicas = service_of(request).replicas
    if replicas is None:
        raise NotFound("there is one engine", "start the server with --replicas N")
    return replicas


def _check_others(several: Replicas, numbers: Iterable[int]) -> None:
    """Refuse to replace a replica while no other serves."""
    for number in numbers:
        if not several.serves_without(number):
            words = f"no other replica would serve while replica {number} is replaced"
            raise Conflict(words, "let more run first: POST /replicas")


def _begin(several: Replicas, what: str, work: Coroutine[Any, Any, None]) -> Response:
    several.operations.begin(what, work)
    return reply(_listed(several), 202)


def _listed(several: Several) -> ReplicaList:
    operation = several.operations.last
    card = None
    if operation is not None:
        card = OperationCard(operation.what, operation.seconds, operation.error)
    cards = [_replica_card(one) for one in several.shown()]
    return ReplicaList(cards, several.num_places, card, _autoscaling_card(several.autoscaler))


def _autoscaling_card(autoscaler: Autoscaler | None) -> AutoscalingCard | None:
    if autoscaler is None:
        return None
    goal, now_s = autoscaler.goal, time.time()
    return AutoscalingCard(
        least=autoscaler.least,
        most=autoscaler.most,
        ttft_goal_s=goal.ttft_s if goal.ttft_s < math.inf else None,
        itl_goal_s=goal.tpot_s or None,
        changes=[
            ChangeCard(now_s - one.at_s, one.before, one.after, one.reason) for one in autoscaler.changes
        ],
    )


def _replica_card(one: ShownReplica) -> ReplicaCard:
    status = one.status
    return ReplicaCard(
        number=one.number,
        name=one.name,
        host=one.host,
        cpus=list(one.processors),
        nodes=list(one.nodes),
        health=one.health,
        pid=status.pid,
        num_open=one.num_open,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_blocks=status.num_blocks,
        num_free_blocks=status.num_free_blocks,
        num_steps=status.steps,
        num_restarts=status.num_restarts,
    )


def _card(one: Routed, tag: str, now_s: float) -> RoutedCard:
    return RoutedCard(
        age_s=now_s - one.at_s,
        request=tag,
        replica=one.replica,
        num_prompt_tokens=one.num_prompt_tokens,
        num_prompt_blocks=one.num_prompt_blocks,
        num_blocks=one.num_blocks,
        no_affinity=one.no_affinity,
        candidates=[CandidateCard(*candidate) for candidate in one.candidates],
    )


ROUTES = [
    Route("/replicas", replicas),
    Route("/replicas", scale, methods=["POST"]),
    Route("/replicas/restart", restart_all, methods=["POST"]),
    Route("/replicas/{number:int}/restart", restart, methods=["POST"]),
    Route("/router/decisions", decisions),
]
