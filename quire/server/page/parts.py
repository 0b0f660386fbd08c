"""The parts of the feed's frames, as JSON: what is shown of steps, caches, counters and settings.

Nothing in them is of a request's content or of its client. A request is shown as its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.status import EngineStatus, ModelFacts
from quire.engine.step_law import StepCosts
from quire.engine.view import GroupView, RowView, StepView
from quire.server.admin import info_of
from quire.server.service import ServiceState
from quire.server.steps import ceilings_of
from quire.step_record import Record

Tag = Callable[[str], str]
encode = msgspec.json.Encoder().encode


class ServerFacts(msgspec.Struct):
    """The settings of the server, as /server_info and /steps have them."""

    version: str
    fingerprint: str
    names: list[str]
    keyed: bool
    recording: bool
    experiments: bool
    ceilings: dict[str, float] | None
    ceilings_age_s: float | None
    model: ModelFacts | None
    engine: dict[str, Any]
    num_slots: int
    num_blocks: int
    block_size: int
    chosen: dict[str, str]

    @classmethod
    def of(cls, service: ServiceState, experiments: bool) -> ServerFacts:
        """Return the facts for a viewer who may start experiments, or may not."""
        info, facts = info_of(service), service.engine.status.facts
        ceilings, age_s = ceilings_of(facts)
        return cls(
            version=info.version,
            fingerprint=info.system_fingerprint,
            names=info.models,
            keyed=service.keyed,
            recording=service.recorder is not None,
            experiments=experiments,
            ceilings=ceilings,
            ceilings_age_s=age_s,
            model=info.model,
            engine=info.engine,
            num_slots=service.engine_config.max_num_seqs,
            num_blocks=facts.limits.num_blocks,
            block_size=facts.limits.block_size,
            chosen=info.chosen,
        )


class Counts(msgspec.Struct):
    """The state of the engine, and sums since the start."""

    state: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int

    @classmethod
    def of(cls, status: EngineStatus) -> Counts:
        totals = status.totals
        return cls(
            status.state,
            status.num_running,
            status.num_waiting,
            status.num_blocks,
            status.num_free_blocks,
            totals.num_tokens,
            totals.num_cached_tokens,
            totals.num_preemptions,
        )


class Watched(msgspec.Struct):
    """The fields of a step that its Record does not have; null if it was not viewed.

    Times are in seconds since the server started; the costs are exact.
    """

    began_s: float | None = None
    ended_s: float | None = None
    rows: list[RowView] | None = None  # each with a tag in place of the request id
    flops: float | None = None
    weight_bytes: float | None = None
    kv_read_bytes: float | None = None
    kv_write_bytes: float | None = None
    activation_bytes: float | None = None


class TableEvent(msgspec.Struct):
    """The block table of a sequence: from entry `first` on, earlier ones left the window."""

    tag: str
    slot: int
    num_tokens: int
    num_cached_tokens: int
    first: int
    blocks: tuple[int, ...]


class Group(msgspec.Struct):
    """The blocks of a cache group, each as [id, holders, findable]."""

    num_blocks: int
    window: int | None
    num_free: int
    num_held: int
    num_findable: int
    blocks: list[tuple[int, int, int]]
    tables: list[TableEvent]

    @classmethod
    def of(cls, view: GroupView, tag: Tag) -> Group:
        tables = [TableEvent(tag(table.request_id), *table[1:]) for table in view.tables]
        blocks = view.held + [(block, 0, 1) for block in view.idle]
        num_held = view.num_blocks - view.num_free
        return cls(view.num_blocks, view.window, view.num_free, num_held, view.num_findable, blocks, tables)


class Cache(msgspec.Struct):
    """The cache groups that have blocks."""

    groups: list[Group]


def encode_step(
    record: Record, view: StepView | None, costs: StepCosts | None, tag: Tag, started_s: float
) -> bytes:
    """Return the JSON of a step: the fields of its record, and what only those who watch are told."""
    if view is None:
        watched = Watched()
    else:
        _, began_s, ended_s, rows = view
        shown = [(*row[:-1], tag(row[-1])) for row in rows]
        cost: Iterable[float] = ()
        if costs is not None:
            cost = costs.of([row[1:3] for row in rows], sum([row[4] for row in rows]))
        watched = Watched(began_s - started_s, ended_s - started_s, shown, *cost)
    return encode(record)[:-1] + b"," + encode(watched)[1:]
