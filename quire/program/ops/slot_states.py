"""States of slots in the reference: rows are computed from what these keep, and snapshots are taken of it.

Rows are computed from kept inputs or a kept state (quire.program.caches.SlotState), not from the end of the
previous row: so bits depend only on positions, rejected drafts need no rollback, and a snapshot taken at any
position continues like its original sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.program.caches import SlotState
from quire.program.dtypes import ITEM_BYTES
from quire.program.features import Feature

if TYPE_CHECKING:
    from quire.program.program import Load, Run

CHUNK = 64  # positions computed from one state; a multiple of every block size


@dataclass(slots=True)
class States:
    """The states of a layer in the reference, as arrays.

    `borders` has the state at chunk boundary n at index n modulo 2, `inputs` those of position p at index p
    modulo `history`.
    """

    borders: np.ndarray  # [slots, 2, *shape]
    inputs: np.ndarray  # [slots, history, inputs]
    snapshot_borders: np.ndarray  # [snapshots, *shape]
    snapshot_inputs: np.ndarray  # [snapshots, reach, inputs]

    @classmethod
    def empty(cls, spec: SlotState, num_slots: int, num_snapshots: int) -> States:
        """Allocate the states of so many slots and snapshots."""

        def array(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.dtype(spec.dtype))

        return cls(
            array(num_slots, 2, *spec.shape),
            array(num_slots, spec.history, spec.inputs),
            array(num_snapshots, *spec.shape),
            array(num_snapshots, spec.reach, spec.inputs),
        )

    def restore(self, slot: int, position: int, snapshot: int) -> None:
        """Set a slot to the state of a snapshot."""
        self.borders[slot, position // CHUNK % 2] = self.snapshot_borders[snapshot]
        places = np.arange(position - self.snapshot_inputs.shape[1], position) % self.inputs.shape[1]
        self.inputs[slot, places] = self.snapshot_inputs[snapshot]

    def before(self, slot: int, position: int) -> np.ndarray:
        """Return the inputs of the `reach` positions before this one, zero before position 0."""
        positions = np.arange(position - self.snapshot_inputs.shape[1], position)
        held = self.inputs[slot, positions % self.inputs.shape[1]]
        held[positions < 0] = 0
        return held

    def keep(self, slot: int, position: int, inputs: np.ndarray) -> None:
        """Store the inputs of positions position, position + 1, ..., as many of the last as fit."""
        positions = np.arange(position, position + len(inputs))[-self.inputs.shape[1] :]
        self.inputs[slot, positions % self.inputs.shape[1]] = inputs[-len(positions) :]


@dataclass(frozen=True, slots=True)
class StateRow:
    """One row of a batch, and the snapshots taken of it."""

    tokens: slice
    slot: int
    start: int
    end: int
    saved: dict[int, int]  # position -> snapshot


def rows_of(run: Run, layer: int) -> Iterator[StateRow]:
    """Restore snapshots, then yield the rows of a batch."""
    states: States = run.caches[layer]
    batch, group = run.batch, run.groups[layer]
    for restored in batch.restored:  # all of them, before any row overwrites a state
        if restored.group == group:
            states.restore(restored.slot, restored.position, restored.snapshot)
    for row, (slot, end) in enumerate(zip(batch.slots.tolist(), batch.context_lens.tolist(), strict=True)):
        tokens = slice(*batch.row_offsets[row : row + 2].tolist())
        start = end - tokens.stop + tokens.start
        saved = {s.position: s.snapshot for s in batch.saved if (s.slot, s.group) == (slot, group)}
        yield StateRow(tokens, slot, start, end, saved)


def keep(states: States, row: StateRow, inputs: np.ndarray) -> np.ndarray:
    """Store the inputs of a row [count, inputs], also in its snapshots.

    Returns them as stored and those of the `reach` positions before, [reach + count, inputs].
    """
    stored = inputs.astype(states.inputs.dtype)
    known = np.concatenate([states.before(row.slot, row.start), stored])
    states.keep(row.slot, row.start, stored)
    for position, snapshot in row.saved.items():
        first = position - row.start
        states.snapshot_inputs[snapshot] = known[first : first + states.snapshot_inputs.shape[1]]
    return known


class Chunk(Protocol):
    """The state at a chunk boundary and what was kept of each position since."""

    def set(self, place: int, kept: np.ndarray) -> None:
        """Set what was kept of a position, an index from the boundary on."""
        ...

    def step(self, place: int, token: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the output of the next position, a token of the step, and what is kept of it."""
        ...

    def after(self) -> np.ndarray:
        """Return the state at the next boundary."""
        ...


def by_chunks(
    states: States, row: StateRow, start: Callable[[np.ndarray | None], Chunk], out: np.ndarray
) -> None:
    """Compute one row, into `out`; store what is kept of it, boundary states and snapshots.

    `start` returns the empty chunk after a boundary with this state; None: that of position 0.
    """
    begin, borders = row.start // CHUNK * CHUNK, states.borders[row.slot]
    known = states.before(row.slot, row.start)
    known = known[len(known) - (row.start - begin) :]
    chunk = start(borders[begin // CHUNK % 2] if begin else None)
    for place, numbers in enumerate(known):
        chunk.set(place, numbers)
    kept = np.empty((row.end - row.start, states.inputs.shape[-1]), np.float32)
    for position in range(row.start, row.end + 1):
        if position % CHUNK == 0 and position > begin:
            borders[position // CHUNK % 2] = chunk.after()
            chunk = start(borders[position // CHUNK % 2])
        if position in row.saved:
            states.snapshot_borders[row.saved[position]] = borders[position // CHUNK % 2]
        if position < row.end:
            token = row.tokens.start + position - row.start
            out[token], kept[position - row.start] = chunk.step(position % CHUNK, token)
    keep(states, row, kept)


def boundary_bytes(state: SlotState, load: Load) -> tuple[float, float]:
    """Return (read, written) of rows computed by chunks: a row reads the state at the boundary before it and
    what was kept since; it writes what it keeps and the states at the last two boundaries it passes."""
    read, written = input_bytes(state, load, Feature("since_boundary", CHUNK))
    size = math.prod(state.shape) * ITEM_BYTES[state.dtype]
    read += size * load.value(Feature("past_boundary", CHUNK))
    return read, written + size * load.value(Feature("boundaries", CHUNK))


def input_bytes(state: SlotState, load: Load, needed: Feature) -> tuple[float, float]:
    """Return the bytes of inputs read and written by rows that need so many previous ones."""
    position = state.inputs * ITEM_BYTES[state.dtype]
    return position * load.value(needed), position * load.value(Feature("latest", state.history))
