"""Matrix products with weights: nearly all operations, and in decoding nearly all bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array, matmul
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """out = x weight^T + bias: x [.., in] flattened to rows, weight [out, in], bias [out] or none."""

    x: Value
    weight: WeightSpec
    bias: WeightSpec | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.weight.size

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0]
        product = matmul(x.reshape(len(x), self.x.width), run.matrix(self.weight))
        if self.bias is not None:
            product += run.weights[self.bias.name]
        return product.reshape(len(x), *self.out.shape)


@dataclass(frozen=True, slots=True)
class GatedLinear(Op):
    """out = activation(x gate^T) * (x up^T), gate and up [out, in]: one pass over x, a result of fusion."""

    x: Value
    gate: WeightSpec
    up: WeightSpec
    activation: str

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.gate, self.up)

    def flops(self, load: Load) -> float:
        rows = load.size(self.out.count)
        return 2 * rows * (self.gate.size + self.up.size) + 5 * rows * self.out.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        gate = matmul(inputs[0], run.matrix(self.gate))
        return ACTIVATIONS[self.activation](gate) * matmul(inputs[0], run.matrix(self.up))
