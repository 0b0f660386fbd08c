"""Lowering a program to the native core: record each op there by a few calls, once, at load.

The core groups ops into phases; this module only determines their order. Products of the same activations are
adjacent (quire.program.passes.gather_products), so that these are packed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, singledispatchmethod
from itertools import groupby
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.attention import AttentionLowering, CachedAttention
from quire.backends.native.caches import NativeCaches
from quire.backends.native.routing import routing_of
from quire.backends.native.streams import StreamOp, record_streams
from quire.errors import ConfigError
from quire.program import ops
from quire.program.passes import BufferPlan, plan_buffers
from quire.program.program import Op, Program, Value, WeightSpec
from quire.program.rope import Rope
from quire.quantize.kinds import DTYPE_NAMES

Matrices = Mapping[str, _core.Matrix]
Vectors = Mapping[str, np.ndarray]


class Lowering:
    """Records a program's ops in the core.

    `ropes` are the rope tables by their parameters, `sites` the numbers of the weights that adapters add to.
    """

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
        self.sites: dict[str, int] = {}
        self._places: dict[tuple[int, float, int], int] = {}  # rope tables by places
        self._matrices = matrices
        self._vectors = vectors
        self._caches = caches
        if others := {v.dtype for op in program for v in op.outputs()} - {"float32", "int32"}:
            problem = f"the native backend computes in float32, and this program has values of {min(others)}"
            raise ConfigError(problem, "use device='reference'")
        self._attention = AttentionLowering(native, caches, self._at, self._vector)
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
        self.hidden = -1 if program.hidden is None else self._at(program.hidden)

    def _at(self, value: Value) -> int:
        return self._buffers[self._plan.buffer[value.index]]

    def _vector(self, spec: WeightSpec | None) -> np.ndarray | None:
        return None if spec is None else self._vectors[spec.name].reshape(-1)

    def _products(self, products: list[Op]) -> None:
        """Record linears of one value. Different weights may need different packed activations."""
        x: Value = products[0].x  # type: ignore[attr-defined]
        linears: list[tuple[_core.Matrix, Callable[[], None]]] = []
        gates: list[Callable[[], None]] = []
        for op in products:
            matrix = self._matrices[op.weights()[0].name]
            if isinstance(op, ops.GatedLinear) and _kernel(matrix) != _kernel(self._matrices[op.up.name]):
                parts, gate = self._apart(op)
                linears += parts
                gates.append(gate)
            else:
                linears.append((matrix, partial(self.record, op)))
        for _, same in groupby(linears, lambda linear: _form(linear[0])):
            together = list(same)
            self.native.pack(x.count, self._at(x), x.width, together[0][0])
            self.native.products(x.count)
            for _, record in together:
                record()
        for record in gates:
            record()
        adapted = [op for op in products if isinstance(op, ops.Linear) and op.adapted]
        if adapted:
            sites = [self.sites.setdefault(op.weight.name, len(self.sites)) for op in adapted]
            targets = [(self._at(op.out), site) for op, site in zip(adapted, sites, strict=True)]
            self.native.add_adapters(x.count, self._at(x), x.width, targets)

    def _apart(
        self, op: ops.GatedLinear
    ) -> tuple[list[tuple[_core.Matrix, Callable[[], None]]], Callable[[], None]]:
        """Return the two products of a gated linear, and the op that joins them."""
        count, width = op.out.count, op.out.width
        gate, up = self.native.buffer(count, width), self.native.buffer(count, width)
        linears = list[tuple[_core.Matrix, Callable[[], None]]]()
        for spec, place in ((op.gate, gate), (op.up, up)):
            matrix = self._matrices[spec.name]
            linears.append((matrix, partial(self.native.linear, place, matrix, None)))
        return linears, partial(self.native.gate, count, self._at(op.out), gate, up, width, op.activation)

    @singledispatchmethod
    def record(self, op: Op) -> None:
        """Record one op."""
        raise ConfigError(
            f"the native backend has no kernel for {type(op).__name__}", "use device='reference'"
        )

    @record.register
    def _(self, op: ops.Embed) -> None:
        out, name = self._at(op.out), op.table.name
        which = (isinstance(op, ops.PositionEmbed), *(op.replaced or (-1, -1)))
        if name in self._vectors:  # read in place
            table = self._vectors[name]
            format = DTYPE_NAMES[table.dtype]
            bits = table if format == "f32" else table.view(np.uint16)
            self.native.embed_stored(out, bits, format, *which)
        else:
            self.native.embed(out, self._matrices[name], *which)

    @record.register
    def _(self, op: ops.EmbedSegments) -> None:
        self.native.embed_segments(self._at(op.out), self._matrices[op.table.name], op.separator)

    @record.register
    def _(self, op: ops.PoolRows) -> None:
        self.native.pool_rows(self._at(op.out), self._at(op.x), op.x.width, op.method == "mean")

    @record.register
    def _(self, op: ops.RowAttention) -> None:
        out, q, k, v = (self._at(value) for value in (op.out, op.q, op.k, op.v))
        (heads, _), (groups, dim), (_, value_dim) = op.q.shape, op.k.shape, op.v.shape
        biases, own = None, 0
        if op.distances is not None:
            biases = op.distances.biases(self._vectors[op.distances.table.name]).reshape(-1)
            own = op.distances.longest - 1
        how = (op.scale, op.reach or 0, biases, own, self._caches.halves, op.window is not None)
        self.native.attend_rows(out, q, k, v, heads, groups, dim, value_dim, *how)

    @record.register
    def _(self, op: ops.SampledRows) -> None:
        self.native.sampled_rows(self._at(op.out), self._at(op.x), op.x.width)

    @record.register
    def _(self, op: ops.PreviousHidden | ops.Patches) -> None:
        self.native.previous_hidden(self._at(op.out), op.out.width)

    @record.register
    def _(self, op: ops.MixedRows) -> None:
        table = self._matrices[op.table.name]
        self.native.mixed_rows(self._at(op.out), self._at(op.places), table, op.places.width // 2)

    @record.register
    def _(self, op: ops.RotaryAt) -> None:
        (heads, dim), key = op.x.shape, (op.places.index, op.theta, op.x.shape[1])
        if key not in self._places:
            self._places[key] = self.native.place_table(
                self._at(op.places), op.places.width, dim // 2, op.frequencies()
            )
        self.native.rotary("T", self._at(op.out), self._at(op.x), heads, dim, self._places[key], False)

    @record.register
    def _(self, op: ops.JoinRows) -> None:
        self.native.join_rows(self._at(op.out), self._at(op.x), op.out.width)

    @record.register
    def _(self, op: ops.MeanOfRows) -> None:
        self.native.mean_of_rows(self._at(op.out), self._at(op.x), op.number, op.x.width)

    @record.register
    def _(self, op: ops.PlaceImages) -> None:
        self.native.place_images(self._at(op.out), self._at(op.x), op.x.width, op.first, op.added)

    @record.register
    def _(self, op: ops.Join) -> None:
        x, y = self._at(op.x), self._at(op.y)
        self.native.join(op.x.count, self._at(op.out), x, op.x.width, y, op.y.width)

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
        weight = np.ones(op.x.shape[-1], np.float32) if op.weight is None else self._vectors[op.weight.name]
        x, out = self._at(op.x), self._at(op.out)
        self.native.norm(op.x.count, out, x, op.x.width, weight, self._vector(bias), **how)

    @record.register
    def _(self, op: ops.MatchMagnitude) -> None:
        x, like, width = self._at(op.x), self._at(op.like), op.x.width
        self.native.match_magnitude(op.x.count, self._at(op.out), x, like, width, op.floor)

    @record.register
    def _(self, op: ops.AboveCutoff) -> None:
        self.native.above_cutoff(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.deviations)

    @record.register
    def _(self, op: ops.GatedRMSNorm) -> None:
        out, x, gate = self._at(op.out), self._at(op.x), self._at(op.gate)
        how = (self._vectors[op.weight.name], op.eps, op.activation, op.gate_first, op.groups)
        self.native.gated_norm(op.x.count, out, x, gate, op.x.width, *how)

    @record.register
    def _(self, op: ops.AddNorm) -> None:
        self.record(ops.Add(op.total, op.x, op.y))
        self.record(op.norm)

    @record.register
    def _(self, op: ops.Add) -> None:
        self.native.add(op.x.count, self._at(op.out), self._at(op.x), self._at(op.y), op.x.width)

    @record.register
    def _(self, op: ops.Unary) -> None:
        self.native.unary(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.activation)

    @record.register
    def _(self, op: ops.Clip) -> None:
        low, high = (float(self._vectors[spec.name].reshape(-1)[0]) for spec in op.weights())
        self.native.clip(op.x.count, self._at(op.out), self._at(op.x), op.x.width, low, high)

    @record.register
    def _(self, op: ops.Standardize) -> None:
        bias, factors = (self._vectors[spec.name].reshape(-1) for spec in op.weights())
        self.native.standardize(op.x.count, self._at(op.out), self._at(op.x), bias, factors)

    @record.register
    def _(self, op: ops.Xielu) -> None:
        factors = op.factors(*(self._vectors[spec.name] for spec in op.weights()))
        self.native.xielu(op.x.count, self._at(op.out), self._at(op.x), op.x.width, *factors)

    @record.register
    def _(self, op: ops.Scale) -> None:
        self.native.scale(op.x.count, self._at(op.out), self._at(op.x), op.x.width, op.factor)

    @record.register
    def _(self, op: ops.ScaleByPosition) -> None:
        x, out = self._at(op.x), self._at(op.out)
        self.native.scale_by_position(out, x, op.x.width, op.beta, op.period, op.first)

    @record.register
    def _(self, op: ops.ScaleByWeight) -> None:
        weight, width = self._vectors[op.weight.name].reshape(-1), op.x.width
        self.native.scale_by_weight(op.x.count, self._at(op.out), self._at(op.x), width, weight)

    @record.register
    def _(self, op: ops.ScaleParts) -> None:
        x, out = self._at(op.x), self._at(op.out)
        self.native.scale_by_weight(op.x.count, out, x, op.x.width, op.factors)

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
        by_row = op.gate.width == 1 and op.up.width > 1
        where = (op.up.count, self._at(op.out), gate, up, op.up.width, op.activation)
        self.native.gate_rows(*where) if by_row else self.native.gate(*where, op.limit or 0.0)

    @record.register
    def _(self, op: ops.Rotary) -> None:
        if op.rope not in self.ropes:
            axes = op.rope.axes.tolist() if op.rope.sections else []
            own = (op.rope.dim // 2, op.rope.attention_factor, axes, op.rope.behind)
            self.ropes[op.rope] = self.native.rope_table(*own)
        (heads, dim), how = op.x.shape, (self.ropes[op.rope], op.rope.interleaved, op.first, op.inverse)
        self.native.rotary(op.x.count, self._at(op.out), self._at(op.x), heads, dim, *how)

    @record.register
    def _(self, op: CachedAttention) -> None:
        self._attention.record(op)

    @record.register
    def _(self, op: ops.LinearByHead) -> None:
        weight = self._matrices[op.weight.name]
        self.native.linear_by_head(op.x.count, self._at(op.out), self._at(op.x), weight)

    @record.register
    def _(self, op: ops.ShortConvolution) -> None:
        cache, layer = self._caches.states[op.layer]
        weight = np.ascontiguousarray(self._vectors[op.weight.name][:, 0].T)  # [kernel, channels]
        how = (weight.reshape(-1), self._vector(op.bias), op.activation)
        self.native.convolve(self._at(op.out), self._at(op.x), cache, layer, *how)

    @record.register
    def _(self, op: ops.GatedRecurrence) -> None:
        cache, layer = self._caches.states[op.layer]
        self.native.recur(self._at(op.out), self._at(op.x), self._at(op.decay), cache, layer)

    @record.register
    def _(self, op: ops.DeltaRule) -> None:
        cache, layer = self._caches.states[op.layer]
        parts = (op.x, *(op.apart or (op.x, op.x)))  # the same for all three: side by side
        out, q, k, v, decay, beta = (self._at(value) for value in (op.out, *parts, op.decay, op.beta))
        rate, bias = (self._vectors[spec.name] for spec in op.weights())
        how = (rate, bias, op.key_heads, op.state.shape[1], op.beta_factor)
        self.native.delta_rule(out, q, k, v, decay, beta, cache, layer, *how)

    @record.register
    def _(self, op: ops.StateSpace) -> None:
        out, x, length = (self._at(value) for value in (op.out, op.x, op.step))
        rate, bias, skip = (self._vectors[spec.name] for spec in op.weights())
        how = (*self._caches.states[op.layer], rate, bias, skip, op.groups, op.state.shape[1], *op.limits)
        self.native.state_space(out, x, length, *how)

    @record.register
    def _(self, op: StreamOp) -> None:
        record_streams(op, self.native, self._at, self._vectors)

    @record.register
    def _(self, op: ops.Experts) -> None:
        w = op.experts
        matrices = [self._matrices[spec.name] if spec else None for spec in (w.gate, w.up, w.down)]
        biases = [self._vector(spec) for spec in (w.gate_bias, w.up_bias, w.down_bias)]
        out, x, scores = self._at(op.out), self._at(op.x), self._at(op.scores)
        how = (routing_of(op.routing, self._vector), op.activation, op.limit or 0.0, op.shifted)
        self.native.experts(out, x, scores, matrices, biases, *how)


def _form(matrix: _core.Matrix) -> tuple[str, bytes]:
    """Return what activations packed for a matrix depend on."""
    return _core.activations(matrix.format), b"" if matrix.order is None else matrix.order.tobytes()


def _kernel(matrix: _core.Matrix) -> tuple[bool, str, bytes]:
    """Return what two matrices that are multiplied together have in common: one loop computes both."""
    return (matrix.format.startswith("coded"), *_form(matrix))


def _product_of(op: Op) -> int | None:
    """Return the index of the value that a product multiplies; None for other ops."""
    return op.x.index if isinstance(op, ops.Linear | ops.GatedLinear) else None
