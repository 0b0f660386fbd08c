"""The Backend protocol: an executor of programs, as a runner uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.program.batch import Batch
from quire.program.program import LowRank
from quire.types import Failure, Step, StepResult

# Waits for the masks of the rows of a step that have a grammar, by row index; see quire.sampling. A row has
# masks for one or more of its first sampled positions; the others give no token.
GetMasks = Callable[[], Mapping[int, Sequence[Any] | Failure]]


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

        `masks`, given if rows have grammars, is called between the forward pass and sampling. A row that has
        a Failure in place of masks returns it as its error.
        """
        ...

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        """Copy the matrices of an adapter, by the names of weights, for slots with this adapter.

        Callable from any thread, also during steps. Its program must be `adaptable`.
        """
        ...

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter that no slot has, nor will have."""
        ...

    def block_layout(self) -> str:
        """Return what the form of blocks depends on, as text: see quire.backends.block_memory."""
        ...

    def block_bytes(self, group: int) -> int:
        """Return the size of the content of a block of a cache group, or of a snapshot."""
        ...

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Copy out blocks of a cache group, or snapshots, that no step in flight writes."""
        ...

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        """Replace the contents of blocks, or of snapshots. No step may be in flight.

        Raises ValueError for a content of another size.
        """
        ...

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of one batch, in float32, for measurements.

        The next call may overwrite them. No step may be in flight.
        """
        ...
