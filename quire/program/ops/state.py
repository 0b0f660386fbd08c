"""Ops with a state for each slot: a short convolution and a gated linear recurrence.

Rows are computed from kept inputs or a kept state (quire.program.caches.SlotState), not from the end of the
previous row: so bits depend only on positions, rejected drafts need no rollback, and a snapshot taken at any
position continues like its original sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.program.caches import SlotState
from quire.program.dtypes import ITEM_BYTES
from quire.program.features import Feature
from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightSpec

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
class _Row:
    """One row of a batch: inputs [reach + count, inputs] as stored, from position `start` - reach on."""

    tokens: slice
    slot: int
    start: int
    end: int
    inputs: np.ndarray
    saved: dict[int, int]  # position -> snapshot


def _rows(run: Run, layer: int, inputs: np.ndarray) -> Iterator[_Row]:
    """Restore snapshots, then yield the rows of a batch with their inputs [T, inputs], which are stored."""
    states: States = run.caches[layer]
    batch, group = run.batch, run.groups[layer]
    stored = inputs.astype(states.inputs.dtype)
    reach = states.snapshot_inputs.shape[1]
    for restored in batch.restored:  # all of them, before any row overwrites a state
        if restored.group == group:
            states.restore(restored.slot, restored.position, restored.snapshot)
    for row, (slot, end) in enumerate(zip(batch.slots.tolist(), batch.context_lens.tolist(), strict=True)):
        tokens = slice(*batch.row_offsets[row : row + 2].tolist())
        start = end - tokens.stop + tokens.start
        known = np.concatenate([states.before(slot, start), stored[tokens]])
        states.keep(slot, start, stored[tokens])
        saved = {s.position: s.snapshot for s in batch.saved if (s.slot, s.group) == (slot, group)}
        for position, snapshot in saved.items():
            states.snapshot_inputs[snapshot] = known[position - start : position - start + reach]
        yield _Row(tokens, slot, start, end, known, saved)


@dataclass(frozen=True, slots=True)
class ShortConvolution(Op):
    """out[t] = sum over i < kernel of weight[:, 0, i] * x[t - kernel + 1 + i], channel by channel.

    x [T, *shape], weight [channels, 1, kernel]. t counts positions of a sequence; x before the first is zero,
    and is read as stored in the layer's state. The sum runs from the oldest position to the newest (Mamba,
    arXiv:2312.00752, section 3.4).
    """

    x: Value
    weight: WeightSpec
    layer: int
    state: SlotState

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)

    def flops(self, load: Load) -> float:
        return 2 * self.weight.shape[-1] * load.num_tokens * self.x.width

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): the previous inputs a row needs, and its own that later rows may need."""
        return _input_bytes(self.state, load, Feature("earlier", self.state.reach))

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0].reshape(len(inputs[0]), -1)
        weight = run.weights[self.weight.name][:, 0]
        out = np.empty(x.shape, np.float32)
        for row in _rows(run, self.layer, x):
            known, count = row.inputs.astype(np.float32), row.end - row.start
            out[row.tokens] = known[:count] * weight[:, 0]
            for i in range(1, weight.shape[1]):
                out[row.tokens] += known[i : i + count] * weight[:, i]
        return out.reshape(inputs[0].shape)


@dataclass(frozen=True, slots=True)
class GatedRecurrence(Op):
    """out[t] = h[t] = decay[t] * h[t - 1] + x[t], elementwise.

    decay and x [T, *shape]. t counts positions of a sequence; h before the first is zero. h is computed
    position by position from the state at the boundary of its chunk of 64 positions. Only there it is rounded
    to the format of the layer's state; decay and x are rounded wherever they are read. This is the simplest
    linear recurrence (RG-LRU, arXiv:2402.19427; Mamba; gated delta nets have matrices as states).
    """

    x: Value
    decay: Value
    layer: int
    state: SlotState

    def flops(self, load: Load) -> float:
        """Count all positions from the chunk boundary before a row to its end."""
        return 2 * self.x.width * (load.value(Feature("since_boundary", CHUNK)) + load.num_tokens)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): a row reads the state at the boundary before it and the inputs from there
        on; it writes its inputs and the states at the last two boundaries it passes."""
        read, written = _input_bytes(self.state, load, Feature("since_boundary", CHUNK))
        state = self.x.width * ITEM_BYTES[self.state.dtype]
        read += state * load.value(Feature("past_boundary", CHUNK))
        return read, written + state * load.value(Feature("boundaries", CHUNK))

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        states: States = run.caches[self.layer]
        brought = np.concatenate([x.reshape(len(x), -1) for x in inputs], axis=1)  # x, then decay
        out = np.empty((len(brought), self.x.width), np.float32)
        for row in _rows(run, self.layer, brought):
            out[row.tokens] = self._row(states, row)
        return out.reshape(inputs[0].shape)

    def _row(self, states: States, row: _Row) -> Array:
        """Return h of one row, [count, width]; store boundary states and snapshots on the way."""
        known, reach = row.inputs.astype(np.float32), self.state.reach
        x, decay = known[:, : self.x.width], known[:, self.x.width :]
        out = np.empty((row.end - row.start, self.x.width), np.float32)
        begin, borders = row.start // CHUNK * CHUNK, states.borders[row.slot]
        h = borders[begin // CHUNK % 2].astype(np.float32) if begin else np.zeros(self.x.width, np.float32)
        for position in range(begin, row.end + 1):
            if position % CHUNK == 0 and position > begin:
                borders[position // CHUNK % 2] = h
                h = borders[position // CHUNK % 2].astype(np.float32)
            if position in row.saved:
                states.snapshot_borders[row.saved[position]] = borders[position // CHUNK % 2]
            if position < row.end:
                place = position - row.start
                h = decay[reach + place] * h + x[reach + place]
                if place >= 0:
                    out[place] = h
        return out


def _input_bytes(state: SlotState, load: Load, needed: Feature) -> tuple[float, float]:
    """Return the bytes of inputs read and written by rows that need so many previous ones."""
    position = state.inputs * ITEM_BYTES[state.dtype]
    return position * load.value(needed), position * load.value(Feature("latest", state.history))
