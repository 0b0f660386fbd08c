"""Views of an engine for those who watch it: its steps row by row, and who holds which blocks.

They are built only while somebody watches. Nothing depends on them: plans are the same with and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.request import Sequence
from quire.types import Step, StepResult

if TYPE_CHECKING:
    from quire.engine.caches import Paged
    from quire.engine.scheduler import Scheduler

PERIOD_S = 0.05  # at least, between two views of steps, and of groups
GROUPS_PERIOD_S, GROUPS_BURST = 0.25, 4  # on average, between two views of groups; at once after a pause
STEP_RATE, BURST = 100.0, 2000.0  # steps that are viewed in a second, and at once after a pause
MAX_BLOCKS, MAX_TABLES, MAX_TABLE_BLOCKS = 4096, 64, 1024  # listed of a group


# A row of a step: slot, start, count, tokens of the prompt, logits, drafted and accepted tokens, request id.
RowView = tuple[int, int, int, int, int, int, int, str]


class StepView(NamedTuple):
    """A step that has ended, with the times of its result."""

    step_index: int
    began_s: float
    ended_s: float
    rows: list[RowView]


class TableView(NamedTuple):
    """The blocks of a sequence in a group, from entry `first` on, and the tokens computed into them."""

    request_id: str
    slot: int
    num_tokens: int
    num_cached_tokens: int
    first: int
    block_ids: tuple[int, ...]


class GroupView(NamedTuple):
    """The blocks of a cache group.

    `held` are (id, holders, findable) of the blocks that are held, `idle` the ids of those that are only
    findable, the last used first.
    """

    num_blocks: int
    window: int | None
    num_free: int
    num_findable: int
    held: list[tuple[int, int, int]]
    idle: list[int]
    tables: list[TableView]


class View(NamedTuple):
    """The changes since the last view: steps that ended, the cache groups (None: not viewed)."""

    steps: list[StepView]
    groups: list[GroupView] | None = None


class _Ended(NamedTuple):
    """A step that has ended. `num_tokens` are those that each row gave, if some verified drafted tokens."""

    step: Step
    sequences: Iterable[Sequence]
    began_s: float
    ended_s: float
    num_tokens: list[int]


class Views:
    """Builds the views of an engine: at once, and then after changes, those of steps together.

    Of many short steps, some are left out: showing them would take a part of the time they take. `clock` is
    the engine's.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._ended: list[_Ended] = []  # not viewed yet
        self._steps_due_s = -math.inf
        self._changed = True  # the caches have, since their last view
        self._groups_due_s = self._regular_s = -math.inf
        self._num_viewable = BURST  # steps, at the time of the last one
        self._last_s = clock()

    def take_step(self, step: Step, result: StepResult) -> None:
        """Keep the oldest step in flight, which has ended, before it is committed."""
        now = self._clock()
        viewable = min(BURST, self._num_viewable + (now - self._last_s) * STEP_RATE)
        if viewable >= 1.0:
            viewable -= 1.0
            sequences, drafted = self._scheduler.oldest_in_flight, any(row.drafted for row in step.rows)
            num_tokens = [len(got.token_ids) for got in result.rows] if drafted else []
            self._ended.append(_Ended(step, sequences, result.began_s, result.ended_s, num_tokens))
        self._num_viewable, self._last_s = viewable, now

    def wait_s(self) -> float | None:
        """Return the time until a view is due; None if nothing has changed."""
        due_s = self._steps_due_s if self._ended else math.inf
        if self._changed:
            due_s = min(due_s, self._groups_due_s)
        return None if due_s == math.inf else max(0.0, due_s - self._clock())

    def take(self, changed: bool) -> View | None:
        """Return the view that is due, if any. `changed`: the caches may have, since the last call."""
        self._changed = self._changed or changed
        now, steps, groups = self._clock(), list[StepView](), None
        if self._ended and now >= self._steps_due_s:
            steps = list(map(_view_step, self._ended))
            self._ended, self._steps_due_s = [], now + PERIOD_S
        if self._changed and now >= self._groups_due_s:
            groups = view_groups(self._scheduler)
            self._regular_s = max(now, self._regular_s) + GROUPS_PERIOD_S
            ahead_s = (GROUPS_BURST - 1) * GROUPS_PERIOD_S
            self._changed, self._groups_due_s = False, max(now + PERIOD_S, self._regular_s - ahead_s)
        return View(steps, groups) if steps or groups is not None else None


def _view_step(ended: _Ended) -> StepView:
    step, sequences, began_s, ended_s, num_tokens = ended
    rows = [
        (slot, start, count, one.num_prompt, num_logits, 0, 0, one.request.new.request_id)
        for (slot, start, count, _, _, num_logits, _), one in zip(step.rows, sequences, strict=True)
    ]
    for i, num_given in enumerate(num_tokens):
        num_drafted = len(step.rows[i].drafted)
        num_accepted = max(0, num_given - 1) if num_drafted else 0
        rows[i] = (*rows[i][:5], num_drafted, num_accepted, rows[i][7])
    return StepView(step.index, began_s, ended_s, rows)


def view_groups(scheduler: Scheduler) -> list[GroupView]:
    """View the groups of blocks. Takes time proportional to what is listed, not to the pools."""
    running = tuple(scheduler.running)
    return [_group(number, paged, running) for number, paged in enumerate(scheduler.caches.paged)]


def _group(number: int, paged: Paged, running: Iterable[Sequence]) -> GroupView:
    pool, held, tables = paged.pool, dict[int, None](), list[TableView]()
    for sequence in running:
        table = sequence.tables[number]
        if len(held) < MAX_BLOCKS:
            held.update(dict.fromkeys(table.blocks))
        if len(tables) < MAX_TABLES:
            tables.append(
                TableView(
                    sequence.request.new.request_id,
                    sequence.slot,
                    sequence.num_computed,
                    sequence.num_cached_tokens,
                    table.first,
                    tuple(table.blocks[:MAX_TABLE_BLOCKS]),
                )
            )
    blocks = pool.states(islice(held, MAX_BLOCKS))
    idle, window = pool.idle_findable(MAX_BLOCKS - len(blocks)), paged.group.window
    return GroupView(pool.num_blocks, window, pool.num_free, pool.num_findable, blocks, idle, tables)
