"""Normalization over the last axis: of the hidden state, or of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis (arXiv:1910.07467).

    weight [n] with n the last axis of x: [T, hidden], or [T, heads, dim] for a norm of each head.
    Gemma stores weight - 1: its offset is 1.
    """

    x: Value
    weight: WeightSpec
    eps: float
    offset: float = 0.0

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)

    def flops(self, load: Load) -> float:
        return 4 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0]
        variance = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        weight = run.weights[self.weight.name] + np.float32(self.offset)
        return x / np.sqrt(variance + np.float32(self.eps)) * weight


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """out = (x - mean) / sqrt(var + eps) * weight + bias over the last axis (arXiv:1607.06450)."""

    x: Value
    weight: WeightSpec
    bias: WeightSpec | None
    eps: float

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def flops(self, load: Load) -> float:
        return 7 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0] - np.mean(inputs[0], axis=-1, keepdims=True, dtype=np.float32)
        variance = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        normed = x / np.sqrt(variance + np.float32(self.eps)) * run.weights[self.weight.name]
        return normed if self.bias is None else normed + run.weights[self.bias.name]


@dataclass(frozen=True, slots=True)
class AddNorm(Op):
    """total = x + y, out = norm(total): the residual sum and its norm in one pass, a result of fusion."""

    written: ClassVar[tuple[str, ...]] = ("total", "out")
    x: Value
    y: Value
    total: Value
    norm: RMSNorm | LayerNorm  # its input and output are `total` and `out`

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.norm.weights()

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.out.width + self.norm.flops(load)

    def reference(self, run: Run, *inputs: np.ndarray) -> tuple[Array, Array]:
        total = inputs[0] + inputs[1]
        return total, self.norm.reference(run, total)
