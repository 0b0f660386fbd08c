"""Normalization over the last axis: of the hidden state, or of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis (arXiv:1910.07467).

    weight [n] with n the last axis of x: [T, hidden], or [T, heads, dim] for a norm of each head; or none, as
    if it were ones. Gemma 2 and 3 store weight - 1: their offset is 1.
    """

    x: Value
    weight: WeightSpec | None
    eps: float
    offset: float = 0.0

    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.weight is None else (self.weight,)

    def flops(self, load: Load) -> float:
        return 4 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0]
        variance = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        normed: Array = x / np.sqrt(variance + np.float32(self.eps))
        if self.weight is None:
            return normed
        return normed * (run.weights[self.weight.name] + np.float32(self.offset))


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """out = (x - mean) / sqrt(var + eps) * weight + bias over the last axis (arXiv:1607.06450).

    Without weight and bias x is only normalized.
    """

    x: Value
    weight: WeightSpec | None
    bias: WeightSpec | None
    eps: float

    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(weight for weight in (self.weight, self.bias) if weight is not None)

    def flops(self, load: Load) -> float:
        return 7 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0] - np.mean(inputs[0], axis=-1, keepdims=True, dtype=np.float32)
        variance = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        normed: Array = x / np.sqrt(variance + np.float32(self.eps))
        if self.weight is not None:
            normed = normed * run.weights[self.weight.name]
        return normed if self.bias is None else normed + run.weights[self.bias.name]


@dataclass(frozen=True, slots=True)
class GatedRMSNorm(Op):
    """out = x / sqrt(mean(x^2) + eps) * weight * activation(gate) over the last axis of x.

    With `gate_first` the norm is that of x * activation(gate) instead (Mamba-2, arXiv:2405.21060). weight [n]
    with n the last axis of x; gate is shaped as x. The mean is that of each of `groups` equal parts of the
    axis.
    """

    x: Value
    gate: Value
    weight: WeightSpec
    eps: float
    activation: str
    gate_first: bool = False
    groups: int = 1

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)

    def flops(self, load: Load) -> float:
        return 9 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, gate = inputs[0], ACTIVATIONS[self.activation](inputs[1])
        if self.gate_first:
            x = x * gate
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        variance = np.mean(parts * parts, axis=-1, keepdims=True, dtype=np.float32)
        normed = (parts / np.sqrt(variance + np.float32(self.eps))).reshape(x.shape) * run.weights[
            self.weight.name
        ]
        return normed if self.gate_first else normed * gate


@dataclass(frozen=True, slots=True)
class MatchMagnitude(Op):
    """out = x * sqrt(mean(like^2) / max(mean(x^2), floor)), each mean that of a row: x as large as `like`.

    For Gemma 3n. The factor of a row is computed in float64 and rounded to float32.
    """

    x: Value
    like: Value
    floor: float

    def flops(self, load: Load) -> float:
        return 5 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        axes = tuple(range(1, inputs[0].ndim))
        own, other = (np.mean(v.astype(np.float64) ** 2, axis=axes, keepdims=True) for v in inputs)
        return inputs[0] * np.sqrt(other / np.maximum(own, self.floor)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AboveCutoff(Op):
    """out = max(0, x - cutoff), cutoff = mean + deviations * (standard deviation) of the numbers of a row.

    So of normally distributed numbers a known share stays (Gemma 3n's sparse activations). The cutoff of a
    row is computed in float64 and rounded to float32.
    """

    x: Value
    deviations: float

    def flops(self, load: Load) -> float:
        return 6 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, axes = inputs[0].astype(np.float64), tuple(range(1, inputs[0].ndim))
        cutoff = np.mean(x, axis=axes, keepdims=True) + self.deviations * np.std(x, axis=axes, keepdims=True)
        return np.maximum(inputs[0] - cutoff.astype(np.float32), np.float32(0))


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
