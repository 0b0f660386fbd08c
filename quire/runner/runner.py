"""Runner: launches steps on a backend while computing the masks of grammars in parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from quire.backends.backend import Backend, GetMasks, LaunchedStep
from quire.runner.masks import GrammarSource, GrammarState, Masks
from quire.types import Admission, Failure, Step, StepResult


@dataclass(slots=True)
class _ConstrainedSlot:
    """A slot whose sequence has a grammar: its tokens and the state of the grammar."""

    admission: Admission
    token_ids: list[int]
    drafted: tuple[int, ...] = ()  # after its last row
    state: GrammarState = field(init=False)

    def __post_init__(self) -> None:
        self.state = GrammarState(self.admission)


class _Demand:
    """Demand for drafts: each one that is not verified halves it, down to one draft for 32 rows."""

    def __init__(self) -> None:
        self._num_declined = 0  # since one was verified
        self._num_skipped = 0  # rows since one was made

    def wants(self) -> bool:
        """Return True if a draft is to be made for a row."""
        self._num_skipped += 1
        if self._num_skipped < 1 << self._num_declined:
            return False
        self._num_skipped = 0
        return True

    def learn(self, drafted: tuple[int, ...], verified: tuple[int, ...]) -> None:
        """Take a draft that was made, and what its row verified."""
        used = verified and verified == drafted[: len(verified)]
        self._num_declined = 0 if used else min(self._num_declined + 1, 5)


class Runner:
    """Executes steps on a backend.

    `load_grammars` is called for the first grammar, or by `prepare_grammars`; without it none are allowed.
    With `drafts`, results have the tokens that a grammar forces after theirs, as long as they are verified.
    """

    def __init__(
        self,
        backend: Backend,
        load_grammars: Callable[[], GrammarSource] | None = None,
        *,
        drafts: bool = True,
    ) -> None:
        self._backend = backend
        self._demand = _Demand() if drafts else None
        self._constrained: dict[int, _ConstrainedSlot] = {}  # by slot
        self._masks = Masks(load_grammars) if load_grammars else None

    def prepare_grammars(self) -> None:
        """Load grammars in the background: for a large vocabulary this takes 0.5 s and 100 MB."""
        if self._masks is not None:
            self._masks.prepare()

    def block_bytes(self, group: int) -> int:
        """See Backend.block_bytes."""
        return self._backend.block_bytes(group)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """See Backend.read_blocks."""
        return self._backend.read_blocks(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        """See Backend.write_blocks."""
        self._backend.write_blocks(group, block_ids, contents)

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step after those launched before it.

        The masks of its rows start to be computed here, from all tokens before them. So the next row of a
        sequence with a grammar must be launched only after the row before it was collected.
        """
        if not self._constrained and not any(admission.grammar for admission in step.admitted):
            return self._backend.launch(step)
        self._apply(step)
        rows = {row.slot: index for index, row in enumerate(step.rows) if row.sample}
        constrained = {rows[slot]: one for slot, one in self._constrained.items() if slot in rows}
        if not constrained:
            return self._backend.launch(step)
        pending = self._backend.launch(step, self._begin_masks(step, constrained))
        if self._demand is not None:
            for index, one in constrained.items():
                if one.drafted:
                    self._demand.learn(one.drafted, step.rows[index].drafted)
        return _Collected(pending, constrained, self._demand)

    def _apply(self, step: Step) -> None:
        for slot in step.released:
            self._constrained.pop(slot, None)
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            if admission.grammar:
                self._constrained[admission.slot] = _ConstrainedSlot(admission, list(brought[admission.slot]))

    def _begin_masks(self, step: Step, constrained: Mapping[int, _ConstrainedSlot]) -> GetMasks:
        """Start computing the masks of these rows, by index; return a function that waits for them."""
        asked = [(one.state, one.token_ids, step.rows[index].drafted) for index, one in constrained.items()]
        tasks: Sequence[Future[None]] = self._masks.begin(asked) if self._masks else ()

        def collect() -> Mapping[int, Sequence[Any] | Failure]:
            for task in tasks:
                task.result()
            lost = Failure("this engine has no grammars")
            masks = ((index, one.state) for index, one in constrained.items())
            return {index: state.masks or state.error or lost for index, state in masks}

        return collect


@dataclass(frozen=True, slots=True)
class _Collected:
    """A step with grammars, which receive its tokens when it is collected."""

    pending: LaunchedStep
    constrained: Mapping[int, _ConstrainedSlot]
    demand: _Demand | None

    def result(self) -> StepResult:
        result = self.pending.result()
        rows = list(result.rows)
        for index, one in self.constrained.items():
            row, one.drafted = rows[index], ()
            one.token_ids += row.token_ids
            if self.demand is None or not row.token_ids or not self.demand.wants():
                continue
            if (draft := one.state.draft(one.token_ids)) is not None:
                one.drafted = draft.token_ids
                rows[index] = row._replace(drafts=(draft, *row.drafts))
        return replace(result, rows=tuple(rows))
