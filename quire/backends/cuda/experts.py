"""Mixtures of experts as launches: routing, sorting of pairs by expert, grouped products, sums in order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray
from quire.backends.cuda.exchanges import gather, num_ranks
from quire.backends.cuda.grouped import GroupedProducts, float_tile, is_ordered
from quire.backends.cuda.kernels.product_variants import PRECISIONS
from quire.backends.cuda.kernels.variant import MOST_EXPERTS, row_block
from quire.backends.cuda.kernels.variants import MOST_CHOSEN, SORTED_BLOCK
from quire.backends.cuda.launch_list import At, LaunchList, activation_name
from quire.backends.cuda.rounding import FLOAT_TYPES, rounded_row
from quire.backends.cuda.scratch import Part, carve, row_bytes
from quire.backends.cuda.step_arrays import StepArrays
from quire.program import ops
from quire.program.program import WeightSpec

_ROUNDED, _PICKED, _SHARES, _ORDER, _GATED, _UP, _OUT = range(7)  # parts of scratch memory


def experts(op: ops.Experts, to: LaunchList) -> None:
    """Record a mixture of experts."""
    pairs, weights, routing = _Pairs(op, to), op.experts, op.routing
    _route(op, to, pairs)
    gate, name = weights.gate, "limited" if op.limit is not None else activation_name(op.activation)
    inner, up, limit = weights.up.shape[1], pairs.at(_UP), op.limit or 0.0
    if gate is None:
        pairs.multiply(_UP, *pairs.inputs_of(weights.up), weights.up, weights.up_bias)
        pairs.add("unary", _GATED, inner, (up,), ACTIVATION=name)
    elif pairs.are_floats(gate, weights.up):
        pairs.multiply_gated(_GATED, *pairs.inputs_of(gate), name)
    else:
        pairs.multiply(_GATED, *pairs.inputs_of(gate), gate, weights.gate_bias)
        pairs.multiply(_UP, *pairs.inputs_of(weights.up), weights.up, weights.up_bias)
        both = (pairs.at(_GATED), up)
        pairs.add("gated_activation", _GATED, inner, both, inner, limit, ACTIVATION=name)
    if (ranks := num_ranks(op)) > 1:
        gather(to, op.x.count, routing.chosen, inner, ranks, pairs.at(_GATED), pairs.at(_GATED))
    inside = pairs.in_order(_UP, pairs.at(_GATED), 1, weights.down)
    pairs.multiply(_OUT, *inside, weights.down, weights.down_bias)
    _sum(op, to, pairs)
    to.rounded = None  # scratch memory was written


def pair_parts(op: ops.Experts, formats: Mapping[str, str]) -> tuple[Part, ...]:
    """Return what is kept of each token in scratch memory, quantized activations first.

    `formats` are those of weights.
    """
    hidden, inner, chosen = op.experts.up.shape[2], op.experts.down.shape[2], op.routing.chosen
    *before, down = (formats[matrix.name] for matrix in op.experts.matrices())
    apart = op.routing.on_inputs or any(map(is_ordered, before))  # each pair has inputs of its own
    of_x = max(row_bytes(rounded_row(format, hidden)) for format in before)
    of_pairs = row_bytes(rounded_row(down, inner))
    rounded = max(of_x * (chosen if apart else 1), of_pairs * chosen)
    integers, floats = np.dtype(np.int32), np.dtype(np.float32)
    inside = (chosen * inner, floats)
    return (
        (rounded, np.dtype(np.int8)),
        *((chosen, integers), (chosen, floats), (chosen, integers)),
        *(inside, inside, (chosen * hidden, floats)),
    )


class _Pairs:
    """The pairs (token, expert) of an op: where their arrays are, and launches for them."""

    def __init__(self, op: ops.Experts, to: LaunchList) -> None:
        formats = {name: weight.format for name, weight in to.weights.items()}
        self.op, self._to, self._parts = op, to, pair_parts(op, formats)
        self._offsets = to.constant(np.zeros(op.num_experts + 1, np.int32))
        self._products = GroupedProducts(to, op.num_experts, self.count, self.listed)
        self._x = to.at(op.x), op.routing.chosen
        self._apart = any(map(self._products.is_ordered, op.experts.matrices()[:-1]))
        self._scaled: tuple[At, int] | None = None  # inputs times shares, once they are in _OUT

    def tokens(self, step: StepArrays) -> int:
        return step.counts[self.op.x.count]

    def count(self, step: StepArrays) -> int:
        return self.tokens(step) * self.op.routing.chosen

    def at(self, part: int) -> At:
        """Return where an array of the pairs is."""
        return lambda step: carve(step.scratch, self.tokens(step), self._parts)[part]

    def listed(self, step: StepArrays) -> tuple[DeviceArray, DeviceArray]:
        """Return the pairs in order of their experts, and where those of each begin."""
        return self.at(_ORDER)(step), self._offsets

    def inputs_of(self, matrix: WeightSpec) -> tuple[At, int]:
        """Return where the inputs of gate or up are, and of how many pairs each row: x, or in _OUT their own.

        These are in the order of the matrix, and multiplied by shares if the routing says so.
        """
        if not self.op.routing.on_inputs:
            return self.in_order(_OUT, *self._x, matrix)
        if self._scaled is None or self._apart:
            x, per_token = self.in_order(_OUT, *self._x, matrix)
            self.add("scale_pairs", _OUT, self.op.x.width, (x, self.at(_SHARES)), per_token)
            self._scaled = self.at(_OUT), 1
        return self._scaled

    def in_order(self, free: int, x: At, per_token: int, matrix: WeightSpec) -> tuple[At, int]:
        """Return x, or where it is in the order of each pair's matrix: in the array `free`."""
        if not self._products.is_ordered(matrix):
            return x, per_token
        found = self.at(free)
        self._products.order_inputs(found, x, per_token, matrix, self.at(_PICKED))
        return found, 1

    def are_floats(self, *matrices: WeightSpec) -> bool:
        """Return whether the matrices are floats of one format."""
        formats = {self._to.weights[matrix.name].format for matrix in matrices}
        return len(formats) == 1 and formats <= FLOAT_TYPES.keys()

    def add(
        self, kernel: str, out: int, width: int, inputs: tuple[At, ...], *rest: int | float, **how: Constant
    ) -> None:
        """Record a kernel over the numbers of all pairs, with the arguments (out, inputs, width, rest)."""
        block, to = row_block(width), self.at(out)
        self._to.add(
            kernel,
            lambda step: (self.count(step), -(-width // block), 1),
            lambda step: (to(step), *(at(step) for at in inputs), width, *rest),
            **how,
            BLOCK=block,
        )

    def multiply(self, out: int, x: At, per_token: int, matrix: WeightSpec, bias: WeightSpec | None) -> None:
        """Record the product of x, which has a row for every `per_token` pairs, and each pair's matrix."""
        self._products.multiply(self.at(out), x, per_token, matrix, bias)

    def multiply_gated(self, out: int, x: At, per_token: int, activation: str) -> None:
        """Record the activation of the product with gate times that with up, both of floats."""
        weights, to = self.op.experts, self.at(out)
        gate, up = (self._to.weights[matrix.name] for matrix in weights.matrices()[:2])
        biases = self._to.array(weights.gate_bias), self._to.array(weights.up_bias)
        (number, outputs, inputs), kind = weights.up.shape, FLOAT_TYPES[up.format]
        rows = self._products.floats(x, per_token, inputs, up.format)
        self._products.record(
            "grouped_gated_product",
            outputs,
            lambda step: (
                *(to(step), *rows(step), *self.listed(step), *gate.arrays, *up.arrays, *biases),
                *(outputs, inputs, number, per_token, self.op.limit or 0.0),
            ),
            float_tile(kind),
            {"BIAS": weights.up_bias is not None, "ACTIVATION": activation, "PRECISION": PRECISIONS[kind]},
        )


def _route(op: ops.Experts, to: LaunchList, pairs: _Pairs) -> None:
    """Record the choice of experts and their shares, and the sorting of the pairs."""
    routing, number, scores = op.routing, op.num_experts, to.at(op.scores)
    picked, shares = pairs.at(_PICKED), pairs.at(_SHARES)
    bias, factors = to.array(routing.bias), to.array(routing.factors)
    scaling = to.constant(np.array([routing.scaling]))
    how: dict[str, Constant] = {"FACTORS": routing.factors is not None, "EXPERTS": MOST_EXPERTS}
    weights: tuple[Argument, ...] = (bias, factors)
    rest: tuple[Argument, ...]
    if routing.margin is not None:
        kernel, weights = "route_apart", (factors,)
        rest = (scaling, to.constant(np.array([routing.margin])))
    else:
        kernel = "route"
        rest = (routing.groups, routing.kept_groups, scaling, to.constant(np.array([routing.floor])))
        how["SIGMOID"], how["NORMALIZED"] = routing.affinity == "sigmoid", routing.normalized
        how["BIAS"] = routing.bias is not None
        how["GROUPS"] = routing.group_rank if routing.groups > 1 else ""
    to.add(
        kernel,
        lambda step: (pairs.tokens(step), 1, 1),
        lambda step: (picked(step), shares(step), scores(step), *weights, number, routing.chosen, *rest),
        **how,
    )
    to.add(
        "sort_by_expert",
        lambda step: (number, 1, 1),
        lambda step: (*pairs.listed(step), picked(step), pairs.count(step)),
        BLOCK=SORTED_BLOCK,
    )


def _sum(op: ops.Experts, to: LaunchList, pairs: _Pairs) -> None:
    out, width, block = to.at(op.out), op.out.width, row_block(op.out.width)
    inputs = [pairs.at(part) for part in (_OUT, _PICKED, _SHARES)]
    to.add(
        "sum_experts",
        lambda step: (pairs.tokens(step), -(-width // block), 1),
        lambda step: (out(step), *(at(step) for at in inputs), width, op.routing.chosen),
        WEIGHTED=not op.routing.on_inputs,
        CHOSEN=MOST_CHOSEN,
        BLOCK=block,
    )
