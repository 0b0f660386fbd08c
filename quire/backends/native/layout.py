"""Where every weight of a program lies once it is packed: one run of bytes, known before any is read.

The order is that of the program, so that a step reads memory forwards. The same run of bytes is what the
packed cache keeps in a file. Pure arithmetic: `csrc/kernels/kernels.h` (Panels) and `csrc/core/matrix.h` say
what lies within a matrix, and tests hold the two together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.program import ops
from quire.program.program import Program, WeightSpec
from quire.quantize.kinds import Storage

PANEL, GROUP, ALIGNMENT = 16, 32, 64  # outputs of a panel, inputs of a scale, bytes

_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One weight: [count, outputs, inputs] packed as `format`; or a "vector", [1, 1, size] in float32."""

    name: str
    format: str
    shape: tuple[int, int, int]
    offset: int
    nbytes: int

    def of(self, memory: Any) -> Any:
        """This part of an array of all bytes."""
        return memory[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts in order. They begin at multiples of 64 bytes; `nbytes` is the end of the last one."""

    parts: tuple[Part, ...]
    nbytes: int

    def digest(self) -> str:
        """A name for this layout: another one gives another name."""
        return hashlib.blake2b(repr(self.parts).encode(), digest_size=16).hexdigest()


def plan_layout(program: Program, storage: Mapping[str, Storage]) -> Layout:
    """`storage` says of every weight how it is stored (quire.weights.load.plan)."""
    parts, end = [], 0
    matrices = {name: str(storage[name].kind) for name in matrix_names(program)}
    for together in _multiplied_together(program):
        if len({matrices[name] for name in together}) > 1:
            matrices |= dict.fromkeys(together, "f32")
    for name, spec in program.weights().items():
        if name in matrices:
            shape, format = matrix_shape(spec), matrices[name]
            nbytes = packed_bytes(format, *shape)
        else:
            shape, format, nbytes = (1, 1, spec.size), "vector", spec.size * 4
        parts.append(Part(name, format, shape, end, nbytes))
        end += _round_up(nbytes, ALIGNMENT)
    return Layout(tuple(parts), end)


def matrix_names(program: Program) -> set[str]:
    """The weights that multiply or are looked up in; all others are vectors (of each expert)."""
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
    """Weights that take rows of one layout: a checkpoint that mixes number formats has them as float32."""
    for op in program:
        if isinstance(op, ops.GatedLinear):
            yield op.gate.name, op.up.name
        elif isinstance(op, ops.Experts):
            yield op.experts.gate.name, op.experts.up.name, op.experts.down.name


def matrix_shape(spec: WeightSpec) -> tuple[int, int, int]:
    """(matrices, outputs, inputs) of a weight [out, in] or [experts, out, in]."""
    return prod(spec.shape[:-2]), spec.shape[-2], spec.shape[-1]


def packed_bytes(format: str, count: int, outputs: int, inputs: int) -> int:
    """Bytes of packed matrices: panels of 16 outputs, groups of 32 inputs, 64 bytes from part to part."""
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    if format in _ITEM_BYTES:
        width = _round_up(inputs, 2) if format == "bf16" else inputs  # of bf16, inputs lie in pairs
        return count * _round_up(panels * PANEL * width * _ITEM_BYTES[format], ALIGNMENT)
    values = panels * PANEL * groups * GROUP // (2 if format == "int4" else 1)
    codes = panels * PANEL * groups
    return count * (_round_up(values, ALIGNMENT) + _round_up(codes, ALIGNMENT) + panels * PANEL * 4)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
