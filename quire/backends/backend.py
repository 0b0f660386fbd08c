"""The Backend protocol: an executor of programs, as a runner uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.program.batch import Batch
from quire.types import Failure, Step, StepResult

# Waits for the masks of the rows of a step that have a grammar, by row index; see quire.sampling.
GetMasks = Callable[[], Mapping[int, Any | Failure]]


class LaunchedStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return its results; steps must be collected in order.

        Raises if the step failed. The backend is then unusable: its slots are in an unknown state.
        """


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes of a backend.

    `num_blocks` are the blocks of each cache group. Layers with a state have it for `max_num_seqs` slots and
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
        """Start a step after those launched before it.

        `masks`, given if rows have grammars, is called between the forward pass and sampling. A row whose
        mask is a Failure returns it as its error.
        """
        ...

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of one batch, in float32, for measurements.

        The next call may overwrite them. No step may be in flight.
        """
        ...
