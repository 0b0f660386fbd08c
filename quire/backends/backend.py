"""Backend: an executor of programs. What a runner needs of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from quire.program.batch import Batch
from quire.types import Failure, Step, StepResult

# Waits for the masks of a step's rows that have a grammar, by the index of the row; see quire.sampling.
Masks = Callable[[], Mapping[int, Any | Failure]]


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what it gave; steps are to be collected in their order."""


class Backend(Protocol):
    """Holds a program's weights, its caches and the state of every slot, and computes steps."""

    name: str

    def launch(self, step: Step, masks: Masks | None = None) -> Pending:
        """Let a step compute after all that were launched before it.

        `masks`, where rows have grammars, is called before their tokens are chosen.
        """
        ...

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of one batch, in float32, for whoever measures them.

        The next call may overwrite them.
        """
        ...
