"""Programs divided among the ranks of a group: each multiplies with some outputs of a matrix.

Heads of an attention and outputs of matrices are divided, inputs never. So every sum is that of one
accelerator, in the same order, and results have the same bits on any number of ranks; what they pay for that
is to exchange what a product reads, instead of adding what products gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import singledispatch, singledispatchmethod
from typing import Any

from quire.errors import ConfigError
from quire.program import ops
from quire.program.caches import CacheSpec, PagedKV
from quire.program.program import Op, Program, Value, WeightSpec

# Numbers of a matrix whose result all ranks need: an exchange takes longer than to read smaller ones.
LEAST_SIZE = 1 << 22


@dataclass(frozen=True, slots=True)
class GatherParts(Op):
    """out = the parts x of all ranks, one after the other along the first axis of each token."""

    x: Value


@dataclass(frozen=True, slots=True)
class TakePart(Op):
    """out = the part of this rank of x, of equal parts along the first axis of each token."""

    x: Value


def divided_axes(program: Program, ranks: int) -> dict[str, int]:
    """Return the axes on which weights are divided, by name: those that all ops use so.

    It is the first axis, of outputs, numbers or heads, but for experts, which have it second.
    """
    if ranks == 1:
        return {}
    found, whole = dict[str, int](), set[str]()
    for op in program:
        axes = _axes(op, ranks)
        found |= axes
        whole |= {spec.name for spec in op.weights()} - axes.keys()
    for op in program:
        if not whole.isdisjoint(axes := _axes(op, ranks)):
            whole |= axes.keys()
    return {name: axis for name, axis in found.items() if name not in whole}


@singledispatch
def _axes(op: Op, ranks: int) -> dict[str, int]:
    """Return the axes on which the weights of an op can be divided: of all that are, or of none."""
    return {}


@_axes.register
def _(op: ops.Linear, ranks: int) -> dict[str, int]:
    if op.out.shape[0] % ranks or op.weight.size < LEAST_SIZE:
        return {}
    return _named(0, op.weight, op.bias)


@_axes.register
def _(op: ops.GatedLinear, ranks: int) -> dict[str, int]:
    if op.out.shape[0] % ranks or op.up.size < LEAST_SIZE:
        return {}
    return _named(0, op.gate, op.up)


@_axes.register
def _(op: ops.Experts, ranks: int) -> dict[str, int]:
    own = op.experts
    if op.out.width % ranks or own.up.shape[1] % ranks or own.up.size < LEAST_SIZE:
        return {}
    return _named(1, *own.all())


@_axes.register
def _(op: ops.LinearByHead, ranks: int) -> dict[str, int]:
    return {} if op.out.shape[0] % ranks else _named(0, op.weight)


@_axes.register
def _(op: ops.Attention, ranks: int) -> dict[str, int]:
    return {} if op.k.shape[0] % ranks else _named(0, op.sinks)


@_axes.register
def _(op: ops.ScaleByWeight, ranks: int) -> dict[str, int]:
    by_head = op.weight.shape == op.x.shape and len(op.x.shape) > 1
    return _named(0, op.weight) if by_head and op.x.shape[0] % ranks == 0 else {}


def _named(axis: int, *specs: WeightSpec | None) -> dict[str, int]:
    return {spec.name: axis for spec in specs if spec is not None}


def divide(program: Program, ranks: int, axes: Mapping[str, int]) -> Program:
    """Return the program of each of so many ranks, which have parts of weights on these axes.

    Raises ConfigError for one whose layers would share caches that they do not share undivided.
    """
    if ranks == 1:
        return program
    division = _Division(ranks, axes)
    for op in program:
        division.add(op)
    output, hidden = division.whole(program.output), program.hidden
    found = replace(
        program,
        output=output,
        hidden=None if hidden is None else division.whole(hidden),
        ops=(),
        caches=tuple(divided_spec(spec, ranks) for spec in program.caches),
    )
    if found.layer_groups != program.layer_groups:
        raise ConfigError(
            f"layers of this model cannot be divided among {ranks} GPUs: their caches would be alike",
            "choose another tensor_parallel_size",
        )
    return replace(found, ops=tuple(division.ops))


def divided_spec(spec: CacheSpec, ranks: int) -> CacheSpec:
    """Return what each rank caches: the keys and values of its heads, or everything."""
    if isinstance(spec, PagedKV) and spec.num_heads % ranks == 0:
        return replace(spec, num_heads=spec.num_heads // ranks)
    return spec


class _Division:
    """The ops so far. A value of the program is whole, on every rank, or a part of it is on each, or both."""

    def __init__(self, ranks: int, axes: Mapping[str, int]) -> None:
        self.ops: list[Op] = []
        self._ranks, self._axes = ranks, axes
        self._whole: dict[int, Value] = {}  # by the number of a value of the program
        self._parts: dict[int, Value] = {}
        self._num_values = 0

    # Values

    def whole(self, value: Value) -> Value:
        """Return a value with all of its numbers."""
        if value.index not in self._whole:
            part = self._parts[value.index]
            self.ops.append(GatherParts(self._as_whole(value), part))
        return self._whole[value.index]

    def part(self, value: Value) -> Value:
        """Return the part of a value that each rank has."""
        if value.index not in self._parts:
            whole = self._whole[value.index]
            self.ops.append(TakePart(self._as_part(value), whole))
        return self._parts[value.index]

    def _as_whole(self, value: Value) -> Value:
        self._whole[value.index] = self._new(value, value.shape)
        return self._whole[value.index]

    def _as_part(self, value: Value) -> Value:
        self._parts[value.index] = self._new(value, (value.shape[0] // self._ranks, *value.shape[1:]))
        return self._parts[value.index]

    def _new(self, value: Value, shape: tuple[int, ...]) -> Value:
        self._num_values += 1
        return replace(value, index=self._num_values - 1, shape=shape)

    def _is_apart(self, value: Value) -> bool:
        """Return whether each rank has a part of a value, and none has all of it."""
        return value.index not in self._whole

    # Weights

    def _is_divided(self, *specs: WeightSpec) -> bool:
        return all(spec.name in self._axes for spec in specs)

    def _own(self, spec: WeightSpec) -> WeightSpec:
        """Return the part of a divided weight that a rank has."""
        shape = list(spec.shape)
        shape[self._axes[spec.name]] //= self._ranks
        return replace(spec, shape=tuple(shape))

    def _own_if(self, spec: WeightSpec | None) -> WeightSpec | None:
        return None if spec is None else self._own(spec)

    # Ops

    @singledispatchmethod
    def add(self, op: Op) -> None:
        """Add the ops of each rank for one of the program; by default it is computed by all, in whole."""
        self._compute(op, divided=False)

    def _compute(self, op: Op, divided: bool, **changed: Any) -> None:
        """Add an op of values that are all parts, or all whole, with other fields `changed`."""
        names = [f.name for f in fields(op) if isinstance(getattr(op, f.name), Value)]
        get, put = (self.part, self._as_part) if divided else (self.whole, self._as_whole)
        read = [name for name in names if name not in (*op.written, *changed)]
        values: dict[str, Any] = {name: get(getattr(op, name)) for name in read}
        values |= {name: put(getattr(op, name)) for name in op.written}
        self.ops.append(replace(op, **(values | changed)))

    @add.register
    def _(self, op: ops.AddNorm) -> None:
        x, y = self.whole(op.x), self.whole(op.y)
        total, out = self._as_whole(op.total), self._as_whole(op.out)
        self.ops.append(ops.AddNorm(out, x, y, total, replace(op.norm, x=total, out=out)))

    @add.register
    def _(self, op: ops.Linear) -> None:
        if self._is_divided(op.weight):
            own = {"weight": self._own(op.weight), "bias": self._own_if(op.bias)}
            self._compute(op, True, x=self.whole(op.x), **own)
        else:
            self._compute(op, False)

    @add.register
    def _(self, op: ops.GatedLinear) -> None:
        if self._is_divided(op.gate, op.up):
            own = {"gate": self._own(op.gate), "up": self._own(op.up)}
            self._compute(op, True, x=self.whole(op.x), **own)
        else:
            self._compute(op, False)

    @add.register
    def _(self, op: ops.Experts) -> None:
        """Divide the inner numbers of each expert, which are exchanged, and its outputs."""
        weights = op.experts
        if not self._is_divided(*weights.all()):
            self._compute(op, False)
            return
        own = replace(
            weights,
            gate=self._own_if(weights.gate),
            up=self._own(weights.up),
            down=self._own(weights.down),
            gate_bias=self._own_if(weights.gate_bias),
            up_bias=self._own_if(weights.up_bias),
            down_bias=self._own_if(weights.down_bias),
        )
        self._compute(op, True, x=self.whole(op.x), scores=self.whole(op.scores), experts=own)

    @add.register
    def _(self, op: ops.LinearByHead) -> None:
        if self._is_divided(op.weight):
            self._compute(op, True, weight=self._own(op.weight))
        else:
            self._compute(op, False)

    @add.register
    def _(self, op: ops.Attention) -> None:
        if op.k.shape[0] % self._ranks == 0:
            self._compute(op, True, sinks=self._own_if(op.sinks))
        else:
            self._compute(op, False)

    @add.register
    def _(self, op: ops.SharedAttention) -> None:
        divided = op.spec.num_heads % self._ranks == 0
        self._compute(op, divided, spec=divided_spec(op.spec, self._ranks))

    @add.register
    def _(self, op: ops.LatentAttention) -> None:
        """Divide the heads, all of which read the same latents."""
        if op.q.shape[0] % self._ranks == 0:
            chosen = None if op.chosen is None else self.whole(op.chosen)
            self._compute(op, True, c=self.whole(op.c), r=self.whole(op.r), chosen=chosen)
        else:
            self._compute(op, False)

    @add.register
    def _(self, op: ops.RMSNorm | ops.LayerNorm) -> None:
        """Keep the parts of heads, each of which is computed alone."""
        self._compute(op, len(op.x.shape) > 1 and self._is_apart(op.x))

    @add.register
    def _(self, op: ops.ScaleByWeight) -> None:
        if self._is_divided(op.weight):
            self._compute(op, True, weight=self._own(op.weight))
        else:
            self._compute(op, len(op.x.shape) > 1 and self._is_apart(op.x))

    @add.register
    def _(
        self,
        op: ops.Unary
        | ops.Xielu
        | ops.Scale
        | ops.ScaleByPosition
        | ops.SoftCap
        | ops.Rotary
        | ops.SampledRows,
    ) -> None:
        self._compute(op, self._is_apart(op.x))

    @add.register
    def _(self, op: ops.Add) -> None:
        self._compute(op, self._is_apart(op.x) and self._is_apart(op.y))

    @add.register
    def _(self, op: ops.GatedActivation) -> None:
        one_gate = op.gate.width == 1 < op.up.width
        if one_gate and self._is_apart(op.up):
            self._compute(op, True, gate=self.whole(op.gate))
        else:
            self._compute(op, not one_gate and self._is_apart(op.up) and self._is_apart(op.gate))
