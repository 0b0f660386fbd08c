"""The layout of a program's packed weights: one contiguous buffer, planned before any weight is read.

Weights are in program order, so that a step reads memory forwards. The packed cache stores the same bytes in
a file. `csrc/kernels/kernels.h` (Panels) and `csrc/core/matrix.h` define the layout of a matrix, and the core
computes its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from quire.backends.native import _core
from quire.backends.native.coding import format_of
from quire.program import ops
from quire.program.program import Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.quantize.mixed import MixedStorage
from quire.weights.plan import Layout, WeightPlace

VECTOR = "vector"  # the format of weights that are not multiplied: contiguous float32
IN_PLACE = "in place"  # of tables whose rows are read from the checkpoint: they have no bytes here


def plan_layout(program: Program, storage: Mapping[str, Storage]) -> Layout:
    """Lay out the weights of a program; `storage` is the storage kind of each."""
    matrices, parts = matrix_names(program), list[WeightPlace]()
    in_place = {op.table.name for op in program if isinstance(op, ops.Embed) and op.in_place}
    for name, spec in program.weights().items():
        kind = storage[name]
        if name in in_place and kind.is_float:
            parts.append(WeightPlace(name, IN_PLACE, matrix_shape(spec), 0, 0))
        elif name not in matrices:
            parts.append(WeightPlace(name, VECTOR, (1, 1, spec.size), 0, spec.size * 4))
        elif isinstance(kind, MixedStorage):
            shape = (1, spec.shape[-2], spec.shape[-1])
            parts += [_matrix(name, format_of(own), shape, i) for i, own in enumerate(kind.kinds)]
        else:
            parts.append(_matrix(name, format_of(kind), matrix_shape(spec)))
    return Layout.of(parts, _core.ALIGNMENT)


def _matrix(name: str, format: str, shape: tuple[int, int, int], expert: int | None = None) -> WeightPlace:
    return WeightPlace(name, format, shape, 0, _core.packed_bytes(format, *shape), expert)


def matrix_names(program: Program) -> set[str]:
    """Return the weights used as matrices or lookup tables; all others are vectors (of each expert)."""
    found: set[str] = set()
    for op in program:
        if isinstance(op, ops.Linear | ops.LinearByHead):
            found.add(op.weight.name)
        elif isinstance(op, ops.GatedLinear):
            found |= {op.gate.name, op.up.name}
        elif isinstance(op, ops.Embed | ops.EmbedSegments | ops.MixedRows):
            found.add(op.table.name)
        elif isinstance(op, ops.Experts):
            found |= {weight.name for weight in op.experts.matrices()}
    return found


def matrix_shape(spec: WeightSpec) -> tuple[int, int, int]:
    """Return (matrices, outputs, inputs) of a weight [out, in] or [experts, out, in]."""
    return prod(spec.shape[:-2]), spec.shape[-2], spec.shape[-1]
