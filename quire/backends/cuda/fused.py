"""The ops of a program that are one launch on GPUs: norms of heads and rotations before an attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from quire.program.ops import Attention, RMSNorm, Rotary
from quire.program.passes import gather_products
from quire.program.program import Op, Program, Value, WeightSpec
from quire.program.rope import Rope


@dataclass(frozen=True, slots=True)
class RotatedAttention(Op):
    """`attention` of q and k that are normed by head, if there are norms, and rotated; `turned` is that of q.

    Its launches give the bits of the launches of its ops, but for the order in which a norm adds the numbers
    of a head: that is one for all steps, as programs differ in their ops and not their steps.
    """

    turned: Value
    q: Value
    k: Value
    v: Value
    attention: Attention
    rope: Rope
    norms: tuple[RMSNorm, RMSNorm] | None  # of q and of k

    written: ClassVar[tuple[str, ...]] = ("out", "turned")

    def weights(self) -> tuple[WeightSpec, ...]:
        norms = self.norms or ()
        return (*self.attention.weights(), *(spec for norm in norms for spec in norm.weights()))


def prepared(program: Program) -> Program:
    """Return the program as it is lowered."""
    program = gather_products(program)
    uses = Counter([program.output.index, *(value.index for op in program for value in op.inputs())])
    writer = {value.index: op for op in program for value in op.outputs()}
    single = {index: op for index, op in writer.items() if uses[index] == 1}
    gone, found = set[int](), list[Op]()
    for op in program:
        rotated = _rotated(op, single) if isinstance(op, Attention) else None
        if rotated is not None:
            gone |= {value.index for value in _between(rotated)}
        found.append(rotated or op)
    kept = (op for op in found if isinstance(op, RotatedAttention) or op.out.index not in gone)
    return replace(program, ops=tuple(kept))


def _rotated(op: Attention, single: Mapping[int, Op]) -> RotatedAttention | None:
    """Return an attention with the rotations of its queries and keys, if nothing else reads these.

    `single` are the ops whose values have one reader. Rotations of adjacent numbers have a kernel of their
    own.
    """
    q, k = single.get(op.q.index), single.get(op.k.index)
    if not (isinstance(q, Rotary) and isinstance(k, Rotary)):
        return None
    if q.rope != k.rope or q.rope.interleaved or q.out.shape != op.q.shape or k.out.shape != op.k.shape:
        return None
    norms = _norms(q, k, single)
    sources = (q.x, k.x) if norms is None else (norms[0].x, norms[1].x)
    return RotatedAttention(op.out, q.out, *sources, op.v, op, q.rope, norms)


def _norms(q: Rotary, k: Rotary, single: Mapping[int, Op]) -> tuple[RMSNorm, RMSNorm] | None:
    """Return the norms of heads before rotations, if they are alike and nothing else reads their results."""
    first, second = single.get(q.x.index), single.get(k.x.index)
    if not (isinstance(first, RMSNorm) and isinstance(second, RMSNorm)):
        return None
    by_head = all(
        norm.weight is not None
        and norm.weight.shape == rotary.x.shape[-1:]
        and norm.x.shape == rotary.x.shape
        for norm, rotary in ((first, q), (second, k))
    )
    alike = (first.eps, first.offset) == (second.eps, second.offset)
    return (first, second) if by_head and alike else None


def _between(op: RotatedAttention) -> tuple[Value, ...]:
    """Return the values that are not written any more, and that of the rotated queries."""
    norms = () if op.norms is None else tuple(norm.out for norm in op.norms)
    return op.turned, op.attention.k, *norms
