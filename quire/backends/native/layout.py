"""The layout of a program's packed weights: one contiguous buffer, planned before any weight is read.

Weights are in program order, so that a step reads memory forwards. The packed cache stores the same bytes in
a file. `csrc/kernels/kernels.h` (Panels) and `csrc/core/matrix.h` define the layout of a matrix, and the core
computes its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from quire.backends.native import _core
from quire.program import ops
from quire.program.program import Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.weights.plan import Layout

VECTOR = "vector"  # the format of weights that are not multiplied: contiguous float32


def plan_layout(program: Program, storage: Mapping[str, Storage]) -> Layout:
    """Lay out the weights of a program; `storage` is the storage kind of each."""
    matrices = {name: storage[name].kind for name in matrix_names(program)}
    for together in _multiplied_together(program):
        if len({matrices[name] for name in together}) > 1:
            matrices |= dict.fromkeys(together, "f32")
    parts: list[tuple[str, str, tuple[int, ...], int]] = []
    for name, spec in program.weights().items():
        if (format := matrices.get(name)) is not None:
            shape = matrix_shape(spec)
            parts.append((name, format, shape, _core.packed_bytes(format, *shape)))
        else:
            parts.append((name, VECTOR, (1, 1, spec.size), spec.size * 4))
    return Layout.of(parts, _core.ALIGNMENT)


def matrix_names(program: Program) -> set[str]:
    """Return the weights used as matrices or lookup tables; all others are vectors (of each expert)."""
    found: set[str] = set()
    for op in program:
        if isinstance(op, ops.Linear):
            found.add(op.weight.name)
        elif isinstance(op, ops.GatedLinear):
            found |= {op.gate.name, op.up.name}
        elif isinstance(op, ops.Embed):
            found.add(op.table.name)
        elif isinstance(op, ops.Experts):
            found |= {op.experts.gate.name, op.experts.up.name, op.experts.down.name}
    return found


def _multiplied_together(program: Program) -> Iterator[tuple[str, ...]]:
    """Yield the weights that share packed activations; if their formats differ, they become float32."""
    for op in program:
        if isinstance(op, ops.GatedLinear):
            yield op.gate.name, op.up.name
        elif isinstance(op, ops.Experts):
            yield op.experts.gate.name, op.experts.up.name, op.experts.down.name


def matrix_shape(spec: WeightSpec) -> tuple[int, int, int]:
    """Return (matrices, outputs, inputs) of a weight [out, in] or [experts, out, in]."""
    return prod(spec.shape[:-2]), spec.shape[-2], spec.shape[-1]
