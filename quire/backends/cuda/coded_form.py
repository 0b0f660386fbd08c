"""The form in which kernels multiply weights of other formats: which kernel, which arrays, their layout.

It is derived from a CodedStorage alone, and is written as the format of a weight in the layout of a device.
CodedKind, for which kernels are compiled, leaves out arguments: sizes of groups, offsets, order of inputs.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from quire.backends.cuda.packing import padded
from quire.program.numerics import GROUP, SPAN
from quire.quantize.coded import CodedStorage
from quire.quantize.coded_product import span_of, summed_together
from quire.quantize.groups import ceil_div
from quire.quantize.kinds import Storage

WHOLE = 1 << 30  # inputs of a group that is a row
_LEAST_UNIT = 16
_TYPES: dict[str, tuple[Any, Any]] = {  # of scales, and of their codes, in the kernels
    "16": (np.uint16, None),
    "32": (np.float32, None),
    "16x8": (np.uint16, np.int8),
    "nvfp4": (np.float32, np.uint8),
    "nvfp4 divided": (np.float32, np.uint8),
}
Part = tuple[tuple[int, ...], np.dtype[Any]]  # shape and type of an array


@dataclass(frozen=True, slots=True)
class CodedKind:
    """The constants of the kernels of a weight (kernels.coded_parts)."""

    bits: int
    table: str
    unit: int
    scales: str
    shift: str = ""

    @property
    def is_float(self) -> bool:
        """True if codes are floats, which meet activations that are not integers."""
        return self.table in ("e4m3", "e5m2", "floats")

    def constants(self) -> dict[str, int | str]:
        """Return the constants of products."""
        found: dict[str, int | str] = {"BITS": self.bits, "TABLE": self.table, "UNIT": self.unit}
        found["SCALES"] = self.scales
        return found if self.is_float else found | {"SHIFT": self.shift}

    def pointers(self) -> dict[str, np.dtype[Any]]:
        """Return the types of arrays by argument, as weights have them; absent ones are bytes."""
        byte = np.dtype(np.uint8)
        values, codes = (np.dtype(kind or byte) for kind in _TYPES[self.scales])
        found = {"low": byte, "high": byte, "scales": values, "scale_codes": codes}
        own = self.shift == "minimums"
        return found | {"minimums": values if own else byte, "minimum_codes": codes if own else byte}


@dataclass(frozen=True, slots=True)
class CodedForm:
    """A kind of kernels, and the arguments that weights of one storage share.

    `group` inputs share a scale, `block` the value of two levels. `offset` is subtracted from codes, of 8
    bits from the int8 that is stored. `brain` is 1 for scales in bfloat16, 0 for float16. `ordered` is 1 if
    inputs are in an order of their own.
    """

    kind: CodedKind
    group: int
    block: int
    offset: int
    brain: int
    ordered: int

    @property
    def format(self) -> str:
        """The format of a weight in a layout, from which `of_format` reads this."""
        kind = (str(part) for part in astuple(self.kind))
        return ",".join(("coded", *kind, *(str(getattr(self, f.name)) for f in fields(self)[1:])))

    @classmethod
    def of_format(cls, format: str) -> CodedForm | None:
        """Return the form of a weight in this format, None if it has no codes of another format."""
        name, *parts = format.split(",")
        if name != "coded":
            return None
        bits, table, unit, scales, shift, *numbers = parts
        group, block, offset, brain, ordered = map(int, numbers)
        return cls(
            CodedKind(int(bits), table, int(unit), scales, shift), group, block, offset, brain, ordered
        )

    @property
    def planes(self) -> tuple[int, int]:
        """The bits of codes in the first plane, and in the second one."""
        low = 8 if self.kind.bits == 8 else 4 if self.kind.bits >= 4 else 2
        return low, self.kind.bits - low

    @property
    def span(self) -> int:
        """The inputs of an activation that share a scale; 0 if all of a row do."""
        return 0 if self.kind.table == "rows" else span_of(self.kind.bits)

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return the arrays of a weight of this shape: planes by row, the others by group of inputs.

        "table" is that of the weight, and "order" that of each matrix.
        """
        *outer, outputs, inputs = shape
        spans = ceil_div(inputs, SPAN)
        (low, high), pointers = self.planes, self.kind.pointers()
        groups, blocks = (ceil_div(spans * SPAN, size) for size in (self.group, self.block))
        values, codes = (pointers[name] for name in ("scales", "scale_codes"))
        two = _TYPES[self.kind.scales][1] is not None
        across = padded(outputs)
        of_groups, of_blocks = (*outer, groups, across), (*outer, blocks, across)
        found: dict[str, Part] = {"low": ((*outer, outputs, plane_bytes(spans, low)), pointers["low"])}
        if high:
            found["high"] = ((*outer, outputs, plane_bytes(spans, high)), pointers["high"])
        found["scales"] = (of_blocks if two else of_groups, values)
        if two:
            found["scale_codes"] = (of_groups, codes)
        if self.kind.shift == "zeros":
            found["minimums"] = (of_groups, np.dtype(np.uint8))
        elif self.kind.shift:
            found["minimums"] = (of_blocks if two else of_groups, values)
            if two:
                found["minimum_codes"] = (of_groups, codes)
        if self.ordered:
            found["order"] = ((*outer, inputs), np.dtype(np.int32))
        if self.kind.table == "floats":
            found["table"] = ((1 << self.kind.bits,), np.dtype(np.float32))
        return found


def plane_bytes(spans: int, bits: int) -> int:
    """Return the bytes of a row of a plane: 32 bytes are 256 bits, of 256 / bits inputs."""
    return ceil_div(spans * SPAN * bits, 256) * 32


def coded_form(storage: Storage) -> CodedForm | None:
    """Return the form of weights in a storage kind; None if no kernel multiplies it, or it has no codes."""
    if not isinstance(storage, CodedStorage):
        return None
    bits = 8 if storage.bits == 7 else storage.bits
    table, offset = _meaning(storage)
    scales = _scales(storage)
    shift = "zeros" if storage.zeros else "minimums" if storage.minimums else ""
    kind = CodedKind(bits, table, _unit(storage, bits), scales, shift)
    possible = kind.unit > 0 and not (storage.by_row and storage.ordered)
    if kind.is_float:
        possible = possible and not (shift or storage.ordered)
    elif bits == 8 and offset:  # they are int8 only less 128, which needs sums of activations
        possible = possible and shift != ""
    if not possible:
        return None
    group = storage.group or WHOLE
    two_levels = _TYPES[scales][1] is not None
    block = group * storage.scales.together if two_levels and storage.scales.together else WHOLE
    brain = int(storage.scales.values in ("bf16", "e8m0"))
    return CodedForm(kind, group, block, offset, brain, int(storage.ordered))


def _meaning(storage: CodedStorage) -> tuple[str, int]:
    """Return the name of the table of kernels, and what they subtract from codes."""
    if not isinstance(storage.table, str):
        return "floats", 0
    if storage.by_row:
        return "rows", 0
    if not storage.integers or storage.table in ("iq4nl", "fp4"):
        return storage.table, 0
    if storage.bits >= 7:
        return "integers", -128 if storage.table == "unsigned" else 0
    return "integers", 0 if storage.table == "unsigned" else 1 << (storage.bits - 1)


def _unit(storage: CodedStorage, bits: int) -> int:
    """Return how many inputs are one sum, those in one span and part of a group; 0 if no kernel can."""
    most = SPAN if storage.group is None or storage.by_row else summed_together(storage.group)
    span = span_of(bits) if storage.integers and not storage.by_row else SPAN
    least = _LEAST_UNIT if storage.integers else GROUP
    return min(most, span) if most >= least and SPAN % most == 0 else 0


def _scales(storage: CodedStorage) -> str:
    """Return how kernels read scales: as they are stored where there is a kernel, else as float32."""
    own, minimums = storage.scales, storage.minimums
    if minimums not in (None, own):
        return "32"
    if own.codes is None:
        few = storage.by_row or (not storage.integers and (storage.group or SPAN) >= SPAN)
        return "32" if few or own.values == "f32" else "16"
    small = own.codes == "i8" or (own.codes == "u8" and own.code_bits < 8)
    spans = own.together and (storage.group or SPAN) * own.together % SPAN == 0
    if own.values == "f16" and spans and small and not own.divided:
        return "16x8"
    if (own.values, own.codes, own.together, minimums) == ("f32", "e4m3", 0, None):
        return "nvfp4 divided" if own.divided else "nvfp4"
    return "32"
