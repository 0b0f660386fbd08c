"""Backend: an executor of programs. What a runner needs of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.program.batch import Batch
from quire.types import Failure, Step, StepResult

# Waits for the masks of a step's rows that have a grammar, by the index of the row; see quire.sampling.
GetMasks = Callable[[], Mapping[int, Any | Failure]]


class LaunchedStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what it gave; steps are to be collected in their order.

        After a step that failed, which raises here, the backend is of no use: slots are in an unknown state.
        """


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that a backend is made with.

    `num_blocks` are those of each cache group. Layers that keep a state have it for `max_num_seqs` slots and
    `num_snapshots` snapshots. `max_steps_in_flight` steps may be launched before the first is collected.
    """

    num_blocks: Sequence[int]
    block_size: int
    kv_dtype: str
    max_num_seqs: int
    num_snapshots: int = 0
    max_steps_in_flight: int = 1


class Backend(Protocol):
    """Holds a program's weights, its caches and the state of every slot, and computes steps."""

    name: str

    def launch(self, step: Step, masks: GetMasks | None = None) -> LaunchedStep:
        """Let a step compute after all that were launched before it.

        `masks`, where rows have grammars, is called between the forward pass and sampling. A row
        whose mask is a Failure gives that as its error.
        """
        ...

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of one batch, in float32, for whoever measures them.

        The next call may overwrite them. No step may be in flight.
        """
        ...
