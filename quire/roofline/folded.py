"""Folded costs: the costs of all ops of a program as coefficients of a few features, exactly.

Ops state their costs as sums of features of a `Load`. Here they are asked once, with a Load that gives each
feature as a sum of its own instead of a number. What comes back are the coefficients: nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import mul
from typing import Any, Literal

from quire.engine.step_law import StepCosts
from quire.program.features import LEADING, Feature, Rows, values
from quire.program.ops import (
    Attention,
    Experts,
    GatedLinear,
    GatedRecurrence,
    Linear,
    RowAttention,
    ShortConvolution,
)
from quire.program.program import Cost, Load, Op, Program, WeightBytes

PartName = Literal["products", "head", "attention", "states", "rest"]


@dataclass(frozen=True, slots=True)
class Part:
    """The costs of some ops of a program, as coefficients by feature.

    "products" are matrix products of tokens, "head" those of the positions that need logits, "states"
    convolutions and recurrences, and "rest" is computed row by row. All operations of a part have one data
    type, `arithmetic`.
    """

    name: PartName
    arithmetic: str
    flops: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    kv_read_bytes: tuple[float, ...]
    kv_write_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    def cost(self, found: tuple[float, ...]) -> Cost:
        """Return the cost of a step with these values of the features."""
        return Cost(
            dot(self.flops, found),
            dot(self.weight_bytes, found),
            dot(self.kv_read_bytes, found),
            dot(self.kv_write_bytes, found),
            dot(self.activation_bytes, found),
        )


@dataclass(frozen=True, slots=True)
class FoldedCost:
    """The cost of every step of a program; `features` begin with LEADING."""

    features: tuple[Feature, ...]
    parts: tuple[Part, ...]
    total: Part = field(repr=False)  # of all parts

    def cost(self, rows: Rows, num_logits: int) -> Cost:
        """Return what `Program.cost` would, for rows of (start, count)."""
        return self.total.cost(values(self.features, rows, num_logits))

    def coefficients(self) -> StepCosts:
        """Return the cost of all parts in plain numbers."""
        one = self.total
        return StepCosts(
            self.features,
            one.flops,
            one.weight_bytes,
            one.kv_read_bytes,
            one.kv_write_bytes,
            one.activation_bytes,
        )

    def flops(self, found: tuple[float, ...]) -> dict[str, float]:
        """Return the operations by data type, of a step with these values of the features."""
        flops: dict[str, float] = {}
        for part in self.parts:
            flops[part.arithmetic] = flops.get(part.arithmetic, 0) + dot(part.flops, found)
        return flops


def fold(
    program: Program,
    nbytes: WeightBytes,
    *,
    kv_itemsize: int = 4,
    kv_scale_bytes: int = 0,
    arithmetic: Callable[[Op], str] = lambda op: "f32",
    tile_rows: int = 1,
) -> FoldedCost:
    """Fold the costs of a program whose weights have `nbytes` each.

    A number of the cache has `kv_itemsize` bytes, its scales `kv_scale_bytes` (Load). `arithmetic` gives the
    data type of an op's operations (Device.arithmetic_of). Rows are multiplied in tiles of `tile_rows`: no
    cost counts those, but they become a feature, since times may grow with them.
    """
    nothing: Any = None  # an op that looks at rows instead of features fails
    load = _FormalLoad(nothing, nothing, kv_itemsize, kv_scale_bytes)
    costs: dict[tuple[PartName, str], Cost] = {}
    for op in program:
        key = _part(op), arithmetic(op)
        costs[key] = costs.get(key, Cost()) + op.cost(load, nbytes)
    total = sum(costs.values(), Cost())
    terms = [term for one in _numbers(total) if isinstance(one, _Sum) for term in one.terms]
    tiles = (Feature("tiles", tile_rows),) if tile_rows > 1 else ()
    features = tuple(dict.fromkeys((*LEADING, *tiles, *terms)))

    def part(name: PartName, kind: str, cost: Cost) -> Part:
        return Part(name, kind, *[_row(one, features) for one in _numbers(cost)])

    return FoldedCost(
        features, tuple([part(*key, cost) for key, cost in costs.items()]), part("rest", "", total)
    )


def dot(coefficients: Iterable[float], found: Iterable[float]) -> float:
    """Return the sum of coefficients times features."""
    return sum(map(mul, coefficients, found))


def _part(op: Op) -> PartName:
    match op:
        case Linear() | GatedLinear() | Experts():
            return "products" if op.out.count == "T" else "head"
        case Attention() | RowAttention():
            return "attention"
        case ShortConvolution() | GatedRecurrence():
            return "states"
        case _:
            return "rest"


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """A sum of features with coefficients. Supports what the costs of ops use: +, *, and / by a number."""

    terms: dict[Feature, float]

    def __add__(self, other: _Sum | float) -> _Sum:
        terms = dict(self.terms)
        more = other.terms if isinstance(other, _Sum) else {Feature("one"): other} if other else {}
        for feature, coefficient in more.items():
            terms[feature] = terms.get(feature, 0) + coefficient
        return _Sum(terms)

    def __mul__(self, factor: float) -> _Sum:
        return _Sum({feature: coefficient * factor for feature, coefficient in self.terms.items()})

    def __truediv__(self, divisor: float) -> _Sum:
        return _Sum({feature: coefficient / divisor for feature, coefficient in self.terms.items()})

    __radd__, __rmul__ = __add__, __mul__


def _numbers(cost: Cost) -> tuple[Any, ...]:
    return tuple([getattr(cost, one.name) for one in fields(cost)])


def _row(total: _Sum | float, features: tuple[Feature, ...]) -> tuple[float, ...]:
    """Return the coefficients of a sum; a number is that of "one"."""
    terms = total.terms if isinstance(total, _Sum) else {Feature("one"): total}
    return tuple([terms.get(feature, 0) for feature in features])


class _FormalLoad(Load):
    """A load whose features stand for themselves."""

    def value(self, feature: Feature) -> Any:
        return _Sum({feature: 1})
