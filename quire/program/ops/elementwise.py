"""Elementwise ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array
from quire.program.program import Load, Op, Run, Value


@dataclass(frozen=True, slots=True)
class Unary(Op):
    """out = activation(x)."""

    x: Value
    activation: str

    def flops(self, load: Load) -> float:
        return 4 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return ACTIVATIONS[self.activation](inputs[0])


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """out = x * factor."""

    x: Value
    factor: float

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0] * np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """out = cap * tanh(x / cap) (Gemma 2, arXiv:2408.00118)."""

    x: Value
    cap: float

    def flops(self, load: Load) -> float:
        return 3 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return np.float32(self.cap) * np.tanh(inputs[0] / np.float32(self.cap))


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """out = x[:, first : first + width of out], reshaped: one part of a packed projection."""

    x: Value
    first: int

    def flops(self, load: Load) -> float:
        return 0

    def activation_bytes(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.row_bytes

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        part = inputs[0][:, self.first : self.first + self.out.width]
        return np.ascontiguousarray(part).reshape(len(part), *self.out.shape)


@dataclass(frozen=True, slots=True)
class Add(Op):
    """out = x + y."""

    x: Value
    y: Value

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0] + inputs[1]


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """out = activation(gate) * up (GLU variants, Shazeer, arXiv:2002.05202)."""

    gate: Value
    up: Value
    activation: str

    def flops(self, load: Load) -> float:
        return 5 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return ACTIVATIONS[self.activation](inputs[0]) * inputs[1]
