"""Matrix products with weights: nearly all operations, and in decoding nearly all bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array, matmul
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """out = x weight^T + bias: x [.., in] flattened to rows, weight [out, in], bias [out] or none.

    If it is `adapted`, what the adapters of rows say (LowRank) is added to that. An adapter that does not
    name this weight adds nothing.
    """

    x: Value
    weight: WeightSpec
    bias: WeightSpec | None = None
    adapted: bool = False

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.weight.size

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x = inputs[0].reshape(len(inputs[0]), self.x.width)
        product = matmul(x, run.matrix(self.weight))
        if self.bias is not None:
            product += run.weights[self.bias.name]
        if self.adapted:
            for adapter, rows in run.batch.by_adapter(self.out.count == "L").items():
                if (own := run.adapters[adapter].get(self.weight.name)) is not None:
                    hidden = np.float32(own.scale) * matmul(x[rows], own.down)
                    product[rows] += matmul(hidden, own.up)
        return product.reshape(len(x), *self.out.shape)


@dataclass(frozen=True, slots=True)
class LinearByHead(Op):
    """out[t, h] = weight[h] x[t, h]: x [T, heads, in], weight [heads, out, in], out [T, heads, out]."""

    x: Value
    weight: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.weight.size

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        matrices = run.matrix(self.weight)
        products = [matmul(inputs[0][:, head], matrices[head]) for head in range(self.x.shape[0])]
        return np.stack(products, axis=1)


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
