"""Runner: launches steps on a backend while computing the masks of grammars in parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire.backends.backend import Backend, LaunchedStep
from quire.runner.masks import GrammarSource, GrammarState, Masks
from quire.types import Admission, Failure, Step, StepResult


@dataclass(slots=True)
class _ConstrainedSlot:
    """A slot whose sequence has a grammar: its tokens and the state of the grammar."""

    admission: Admission
    token_ids: list[int]
    state: GrammarState = field(init=False)

    def __post_init__(self) -> None:
        self.state = GrammarState(self.admission)


class Runner:
    """Executes steps on a backend.

    `load_grammars` is called for the first grammar, or by `prepare_grammars`; without it none are allowed.
    """

    def __init__(self, backend: Backend, load_grammars: Callable[[], GrammarSource] | None = None) -> None:
        self._backend = backend
        self._constrained: dict[int, _ConstrainedSlot] = {}  # by slot
        self._masks = Masks(load_grammars) if load_grammars else None

    def prepare_grammars(self) -> None:
        """Load grammars in the background: for a large vocabulary this takes 0.5 s and 100 MB."""
        if self._masks is not None:
            self._masks.prepare()

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
        return _Collected(self._backend.launch(step, self._begin_masks(constrained)), constrained)

    def _apply(self, step: Step) -> None:
        for slot in step.released:
            self._constrained.pop(slot, None)
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            if admission.grammar:
                self._constrained[admission.slot] = _ConstrainedSlot(admission, list(brought[admission.slot]))

    def _begin_masks(
        self, constrained: Mapping[int, _ConstrainedSlot]
    ) -> Callable[[], Mapping[int, Any | Failure]]:
        """Start computing the masks of these rows, by index; return a function that waits for them."""
        asked = [(one.state, one.token_ids, one.admission.eos_token_ids) for one in constrained.values()]
        tasks: Sequence[Future[None]] = self._masks.begin(asked) if self._masks else ()

        def collect() -> Mapping[int, Any | Failure]:
            for task in tasks:
                task.result()
            lost = Failure("this engine has no grammars")
            masks = ((index, one.state) for index, one in constrained.items())
            return {
                index: (state.error or lost) if state.allowed is None else state.allowed
                for index, state in masks
            }

        return collect


@dataclass(frozen=True, slots=True)
class _Collected:
    """A step with grammars, which receive its tokens when it is collected."""

    pending: LaunchedStep
    constrained: Mapping[int, _ConstrainedSlot]

    def result(self) -> StepResult:
        result = self.pending.result()
        for index, one in self.constrained.items():
            one.token_ids += result.rows[index].token_ids
        return result
