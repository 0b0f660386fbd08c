"""Lowering a program to the native core: record each op there by a few calls, once, at load.

The core groups ops into phases; this module only determines their order. Products of the same activations are
adjacent (quire.program.passes.gather_products), so that these are packed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatchmethod
from itertools import groupby
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.caches import NativeCaches
from quire.errors import ConfigError
from quire.program import ops
from quire.program.passes import BufferPlan, plan_buffers
from quire.program.program import Op, Program, Value, WeightSpec
from quire.program.rope import Rope

Matrices = Mapping[str, _core.Matrix]
Vectors = Mapping[str, np.ndarray]


class Lowering:
    """Records a program's ops in the core. `ropes` are the rope tables by their parameters."""

    def __init__(
        self,
        native: _core.Native,
        program: Program,
        matrices: Matrices,
        vectors: Vectors,
        caches: NativeCaches,
    ) -> None:
        self.native = native
        self.ropes: dict[Rope, int] = {}
        self._matrices = matrices
        self._vectors = vectors
        self._caches = caches
        if others := {v.dtype for op in program for v in op.outputs()} - {"float32"}:
            problem = f"the native backend computes in float32, and this program has values of {min(others)}"
            raise ConfigError(problem, "use device='reference'")
        plan = plan_buffers(program)
        self._buffers = [native.buffer(count, row_bytes // 4) for count, row_bytes in plan.sizes]
        self._plan: BufferPlan = plan
        for cache, layer in caches.states.values():
            if layer == 0:
                native.restore_states(cache)
        for product, group in groupby(program.ops, _product_of):
            if product is None:
                for op in group:
                    self.record(op)
            else:
                self._products(list(group))
        self.output = self._at(program.output)

    def _at(self, value: Value) -> int:
        return self._buffers[self._plan.buffer[value.index]]

    def _vector(self, spec: WeightSpec | None) -> np.ndarray | None:
        return None if spec is None else self._vectors[spec.name].reshape(-1)

    def _products(self, products: list[Op]) -> None:
        """Record linears of one value. Weights of different formats need different packed activations."""
        x: Value = products[0].x  # type: ignore[attr-defined]
        for _, same in groupby(products, lambda op: self._matrices[op.weights()[0].name].format):
            parts = list(same)
            self.native.pack(x.count, self._at(x), x.width, self._matrices[parts[0].weights()[0].name])
            self.native.products(x.count)
            for op in parts:
                self.record(op)

    @singledispatchmethod
    def record(self, op: Op) -> None:
        """Record one op."""
        raise ConfigError(
            f"the native backend has no kernel for {type(op).__name__}", "use device='reference'"
        )

    @record.register
    def _(self, op: ops.Embed) -> None:
        table, by_position = self._matrices[op.table.name], isinstance(op, ops.PositionEmbed)
        self.native.embed(self._at(op.out), table, by_position)

    @record.register
    def _(self, op: ops.SampledRows) -> None:
        self.native.sampled_rows(self._at(op.out), self._at(op.x), op.x.width)

    @record.register
    def _(self, op: ops.Linear) -> None:
        self.native.linear(self._at(op.out), self._matrices[op.weight.name], self._vector(op.bias))

    @record.register
    def _(self, op: ops.GatedLinear) -> None:
        gate, up = self._matrices[op.gate.name], self._matrices[op.up.name]
        self.native.gated_linear(self._at(op.out), gate, up, op.activation)

    @record.register
    def _(self, op: ops.RMSNorm) -> None:
        self._norm(op, None, eps=op.eps, offset=op.offset, centered=False)

    @record.register
    def _(self, op: ops.LayerNorm) -> None:
        self._norm(op, op.bias, eps=op.eps, offset=0.0, centered=True)

    def _norm(self, op: ops.RMSNorm | ops.LayerNorm, bias: WeightSpec | None, **how: Any) -> None:
        weight = self._vectors[op.weight.name]
        x, out = self._at(op.x), self._at(op.out)
        self.native.norm(op.x.count, out, x, op.x.width, weight, self._vector(bias), **how)

    @record.register
    def _(self, op: ops.AddNorm) -> None:
        self.native.add(op.x.count, self._at(op.total), self._at(op.x), self._at(op.y), op.x.width)
        self.record(op.norm)

    @record.register
    def _(self, op: ops.Add) -> None:
        self.native.add(op.x.count, self._at(op.out), self._at(op.x), self._at(op.y), op.x.width)

    @record.register
    def _(self, op: ops.Unary) -> None:
        self.native.unary(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.activation)

    @record.register
    def _(self, op: ops.Scale) -> None:
        self.native.scale(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.factor)

    @record.register
    def _(self, op: ops.SoftCap) -> None:
        self.native.soft_cap(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.cap)

    @record.register
    def _(self, op: ops.Slice) -> None:
        x, out = self._at(op.x), self._at(op.out)
        self.native.slice(op.x.count, out, op.out.width, x, op.x.width, op.first)

    @record.register
    def _(self, op: ops.GatedActivation) -> None:
        gate, up = self._at(op.gate), self._at(op.up)
        self.native.gate(op.up.count, self._at(op.out), gate, up, op.up.width, op.activation)

    @record.register
    def _(self, op: ops.Rotary) -> None:
        if op.rope not in self.ropes:
            self.ropes[op.rope] = self.native.rope_table(op.rope.dim // 2, op.rope.attention_factor)
        heads, dim = op.x.shape
        table, interleaved = self.ropes[op.rope], op.rope.interleaved
        self.native.rotary(self._at(op.out), self._at(op.x), heads, dim, table, interleaved)

    @record.register
    def _(self, op: ops.Attention) -> None:
        cache, layer = self._caches.paged[op.layer]
        self.native.write_kv(self._at(op.k), self._at(op.v), cache, layer)
        self.native.attend(
            self._at(op.out),
            self._at(op.q),
            cache,
            layer,
            heads=op.q.shape[0],
            scale=op.scale,
            window=op.window or 0,
            softcap=op.softcap or 0.0,
            sinks=self._vector(op.sinks),
        )

    @record.register
    def _(self, op: ops.ShortConvolution) -> None:
        cache, layer = self._caches.states[op.layer]
        weight = np.ascontiguousarray(self._vectors[op.weight.name][:, 0].T)  # [kernel, channels]
        self.native.convolve(self._at(op.out), self._at(op.x), cache, layer, weight.reshape(-1))

    @record.register
    def _(self, op: ops.GatedRecurrence) -> None:
        cache, layer = self._caches.states[op.layer]
        self.native.recur(self._at(op.out), self._at(op.x), self._at(op.decay), cache, layer)

    @record.register
    def _(self, op: ops.Experts) -> None:
        w = op.experts
        matrices = [self._matrices[spec.name] for spec in (w.gate, w.up, w.down)]
        biases = [self._vector(spec) for spec in (w.gate_bias, w.up_bias, w.down_bias)]
        out, x, scores = self._at(op.out), self._at(op.x), self._at(op.scores)
        over_chosen = op.routing == "softmax_of_chosen"
        self.native.experts(
            out, x, scores, matrices, biases, op.chosen, over_chosen, op.activation, op.limit or 0.0
        )


def _product_of(op: Op) -> int | None:
    """Return the index of the value that a product multiplies; None for other ops."""
    return op.x.index if isinstance(op, ops.Linear | ops.GatedLinear) else None
