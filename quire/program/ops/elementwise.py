"""Elementwise ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array
from quire.program.program import Load, Op, Run, Value, WeightSpec


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
class ScaleParts(Op):
    """out = x, its columns multiplied by the factors of the `parts` (columns, factor) one after the other."""

    x: Value
    parts: tuple[tuple[int, float], ...]

    @property
    def factors(self) -> Array:
        """The factor of each column."""
        columns, factors = zip(*self.parts, strict=True)
        return np.repeat(np.array(factors, np.float32), columns)

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0] * self.factors


@dataclass(frozen=True, slots=True)
class ScaleByPosition(Op):
    """out = x * (1 + beta ln(1 + floor((position + first) / period))), the factor rounded to float32.

    Mistral's `first` is 0, Llama 4's 1.
    """

    x: Value
    beta: float
    period: int
    first: int = 0

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * (self.out.width + 3)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        factors = 1 + self.beta * np.log(1.0 + (run.batch.positions + self.first) // self.period)
        return inputs[0] * factors.astype(np.float32).reshape(-1, *[1] * (inputs[0].ndim - 1))


@dataclass(frozen=True, slots=True)
class ScaleByWeight(Op):
    """out = x * weight: weight [n] with n the last axis of x, shaped as x by token, or [1]."""

    x: Value
    weight: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0] * run.weights[self.weight.name]


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """out = min(max(x, low), high), with bounds [1] that are weights. NaN stays."""

    x: Value
    low: WeightSpec
    high: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.low, self.high)

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        low, high = (run.weights[spec.name] for spec in self.weights())
        return np.minimum(np.maximum(inputs[0], low), high)


@dataclass(frozen=True, slots=True)
class Standardize(Op):
    """out = (x - bias) * factors, x [T, n], both weights [n]."""

    x: Value
    bias: WeightSpec
    factors: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.bias, self.factors)

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return (inputs[0] - run.weights[self.bias.name]) * run.weights[self.factors.name]


@dataclass(frozen=True, slots=True)
class Xielu(Op):
    """out = positive * x^2 + beta * x above 0, negative * (e^x - 1 - x) + beta * x below (arXiv:2411.13010).

    positive = softplus(rise) and negative = softplus(fall) + beta; rise and fall [1] are weights.
    """

    x: Value
    rise: WeightSpec
    fall: WeightSpec
    beta: float

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.rise, self.fall)

    def factors(self, rise: Array, fall: Array) -> tuple[float, float, float]:
        """Return positive, negative and beta, from the weights."""
        positive, negative = (float(np.logaddexp(np.float64(number[0]), 0)) for number in (rise, fall))
        return positive, negative + self.beta, self.beta

    def flops(self, load: Load) -> float:
        return 8 * load.size(self.out.count) * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0]
        factors = self.factors(*(run.weights[spec.name] for spec in self.weights()))
        positive, negative, beta = (np.float32(factor) for factor in factors)
        low = np.minimum(x, np.float32(0))
        return np.asarray(np.where(x > 0, positive * x * x, negative * (np.expm1(low) - low)) + beta * x)


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
    """out = x[:, first : first + width of out] of x flattened to rows, reshaped: a part of a packed value."""

    x: Value
    first: int

    def flops(self, load: Load) -> float:
        return 0

    def activation_bytes(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.row_bytes

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        part = inputs[0].reshape(len(inputs[0]), self.x.width)[:, self.first : self.first + self.out.width]
        return np.ascontiguousarray(part).reshape(len(part), *self.out.shape)


@dataclass(frozen=True, slots=True)
class Join(Op):
    """out = x and y side by side: [T, width of x + width of y]."""

    x: Value
    y: Value

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return np.concatenate([part.reshape(len(part), -1) for part in inputs], axis=1)


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
    """out = activation(gate) * up (GLU variants, Shazeer, arXiv:2002.05202).

    A gate of width 1 is that of all values of its token. With `limit`, of a gate as wide as up, it is at most
    that before its activation, and up within plus and minus that; NaN stays.
    """

    gate: Value
    up: Value
    activation: str
    limit: float | None = None

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * (4 * self.gate.width + self.out.width)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        gate, up = inputs
        if self.gate.width == 1:
            gate = gate.reshape(-1, *[1] * (up.ndim - 1))
        if self.limit is not None:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate) * up
