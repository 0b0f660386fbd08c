"""Passes: from a program to an equivalent program, or to a plan of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeGuard

from quire.program.ops import (
    Add,
    AddNorm,
    GatedActivation,
    GatedLinear,
    LayerNorm,
    Linear,
    RMSNorm,
    SampledRows,
)
from quire.program.program import Count, Load, Op, Program, Value, WeightSpec


def adaptable(program: Program) -> Program:
    """Let adapters add to each product with a weight of its own in the checkpoint.

    It precedes `fuse`, which leaves such products alone.
    """
    ops = (
        replace(op, adapted=True) if isinstance(op, Linear) and module_of(op.weight) else op
        for op in program.ops
    )
    return replace(program, ops=tuple(ops))


def module_of(weight: WeightSpec) -> str | None:
    """Return the name of the module whose weight this is, or a part of it; None for one of several."""
    if len(weight.sources) != 1 or weight.by_head is not None:
        return None
    module, _, parameter = weight.sources[0].rpartition(".")
    return module if parameter == "weight" else None


def fuse(program: Program) -> Program:
    """Fuse adjacent ops to save passes over memory, without changing the bits of the result.

    - an Add and the norm of its sum become AddNorm
    - two Linears of one input and their GatedActivation without limit become GatedLinear
    """
    ops = _fuse_gates(_fuse_norms(list(program.ops)), program.output)
    return replace(program, ops=tuple(ops))


def _fuse_norms(ops: list[Op]) -> list[Op]:
    fused: list[Op] = []
    for op in ops:
        before = fused[-1] if fused else None
        if isinstance(op, RMSNorm | LayerNorm) and isinstance(before, Add) and op.x == before.out:
            fused[-1] = AddNorm(op.out, before.x, before.y, before.out, op)
        else:
            fused.append(op)
    return fused


def _fuse_gates(ops: list[Op], output: Value) -> list[Op]:
    uses = Counter([output.index, *(value.index for op in ops for value in op.inputs())])
    writer: dict[int, Op] = {value.index: op for op in ops for value in op.outputs()}
    gone: set[int] = set()
    fused: list[Op] = []
    for op in ops:
        if isinstance(op, GatedActivation) and op.gate.shape == op.up.shape and op.limit is None:
            gate, up = writer[op.gate.index], writer[op.up.index]
            if _plain(gate, uses) and _plain(up, uses) and gate.x == up.x:
                gone |= {gate.out.index, up.out.index}
                op = GatedLinear(op.out, gate.x, gate.weight, up.weight, op.activation)
        fused.append(op)
    return [op for op in fused if op.out.index not in gone]


def _plain(op: Op, uses: Counter[int]) -> TypeGuard[Linear]:
    """Return True for a Linear without bias and adapters whose result has one reader."""
    return isinstance(op, Linear) and op.bias is None and not op.adapted and uses[op.out.index] == 1


def gather_products(program: Program) -> Program:
    """Make products of one value adjacent, each as early as possible, without changing any bits."""
    ops: list[Op] = []
    for op in program.ops:
        place = len(ops)
        if isinstance(op, Linear | GatedLinear):
            place = _after_last_product(op, ops)
        ops.insert(place, op)
    return replace(program, ops=tuple(ops))


def _after_last_product(op: Linear | GatedLinear, ops: list[Op]) -> int:
    """Return the index after the last product of this kind and value, searching back to the value's op."""
    for place in range(len(ops), 0, -1):
        other = ops[place - 1]
        if isinstance(other, type(op)) and other.x == op.x:
            return place
        if op.x in other.outputs():
            break
    return len(ops)


def hand_out_hidden(program: Program) -> Program | None:
    """Return the program with the hidden states of all tokens after its last norm; None if it has no such.

    They are computed apart from those of the rows that need logits, so no bits of the logits change.
    """
    chosen = {op.out.index: op for op in program if isinstance(op, SampledRows)}
    last = next((op for op in program if isinstance(op, RMSNorm) and op.x.index in chosen), None)
    if last is None:
        return None
    x = chosen[last.x.index].x
    index = 1 + max(value.index for op in program for value in op.outputs())
    norm = replace(last, out=Value(index, x.count, last.out.shape), x=x)
    return replace(program, ops=(*program.ops, norm), hidden=norm.out)


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The assignment of values to buffers. A buffer is reused after the last read of its value."""

    sizes: tuple[tuple[Count, int], ...]  # by buffer: the count of its rows, bytes of a row
    buffer: dict[int, int]  # value index -> buffer
    last_use: dict[int, int]  # value index -> number of the op that reads it last

    def nbytes(self, load: Load) -> int:
        """Return the bytes of activations for a step with this load."""
        return sum(load.size(count) * row_bytes for count, row_bytes in self.sizes)


def plan_buffers(program: Program) -> BufferPlan:
    """Assign values to buffers in order, reusing a free one with rows of the same size.

    A row of a value is then where the same row of the previous value was, so several ops can process a few
    rows before going on to the next ones, without overwriting anything that is still to be read.
    """
    last_use = {v.index: i for i, op in enumerate(program.ops) for v in (*op.inputs(), *op.outputs())}
    for kept in (program.output, program.hidden):
        if kept is not None:
            last_use[kept.index] = len(program.ops)
    sizes: list[tuple[Count, int]] = []
    free: list[int] = []
    buffer: dict[int, int] = {}
    for i, op in enumerate(program.ops):
        for value in op.outputs():
            buffer[value.index] = _take(value, free, sizes)
        done = {v.index for v in (*op.inputs(), *op.outputs()) if last_use[v.index] == i}
        free += sorted(buffer[index] for index in done)
    return BufferPlan(tuple(sizes), buffer, last_use)


def _take(value: Value, free: list[int], sizes: list[tuple[Count, int]]) -> int:
    """Return a free buffer for rows of the value's count and size, or a new one."""
    size = (value.count, value.row_bytes)
    for buffer in free:
        if sizes[buffer] == size:
            free.remove(buffer)
            return buffer
    sizes.append(size)
    return len(sizes) - 1
