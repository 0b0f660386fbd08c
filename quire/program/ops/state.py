"""Ops with a state for each slot: a short convolution and a gated linear recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.caches import SlotState
from quire.program.features import Feature
from quire.program.numerics import ACTIVATIONS, Array
from quire.program.ops.slot_states import CHUNK, StateRow, States, boundary_bytes, input_bytes, keep, rows_of
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class ShortConvolution(Op):
    """out[t] = activation(sum over i < kernel of weight[:, 0, i] * x[t - kernel + 1 + i] + bias), by channel.

    x [T, *shape], weight [channels, 1, kernel], bias [channels] or none. t counts positions of a sequence; x
    before the first is zero, and is read as stored in the layer's state. The sum runs from the oldest
    position to the newest (Mamba, arXiv:2312.00752, section 3.4).
    """

    x: Value
    weight: WeightSpec
    bias: WeightSpec | None
    activation: str
    layer: int
    state: SlotState

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def flops(self, load: Load) -> float:
        more = (self.bias is not None) + 4 * (self.activation != "linear")
        return (2 * self.weight.shape[-1] + more) * load.num_tokens * self.x.width

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): the previous inputs a row needs, and its own that later rows may need."""
        return input_bytes(self.state, load, Feature("earlier", self.state.reach))

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0].reshape(len(inputs[0]), -1)
        weight = run.weights[self.weight.name][:, 0]
        out = np.empty(x.shape, np.float32)
        for row in rows_of(run, self.layer):
            known = keep(run.caches[self.layer], row, x[row.tokens]).astype(np.float32)
            count = row.end - row.start
            out[row.tokens] = known[:count] * weight[:, 0]
            for i in range(1, weight.shape[1]):
                out[row.tokens] += known[i : i + count] * weight[:, i]
        if self.bias is not None:
            out += run.weights[self.bias.name]
        return ACTIVATIONS[self.activation](out).reshape(inputs[0].shape)


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
        return boundary_bytes(self.state, load)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        states: States = run.caches[self.layer]
        brought = np.concatenate([x.reshape(len(x), -1) for x in inputs], axis=1)  # x, then decay
        out = np.empty((len(brought), self.x.width), np.float32)
        for row in rows_of(run, self.layer):
            known = keep(states, row, brought[row.tokens]).astype(np.float32)
            out[row.tokens] = self._row(states, row, known)
        return out.reshape(inputs[0].shape)

    def _row(self, states: States, row: StateRow, known: Array) -> Array:
        """Return h of one row, [count, width]; store boundary states and snapshots on the way."""
        reach = self.state.reach
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
