"""Storage kinds of weights: few, and every foreign format maps onto one of them without loss.

`Dense` keeps the checkpoint's floating point numbers. `Int8` and `Int4` keep integers with one scale for
each group of consecutive inputs of one output row; the last group of a row may be shorter than the
others, so any row length can be stored. A group as long as the row is one scale per output channel.

    Q8_0           Int8, groups of 32, f16 scales
    Q4_0           Int4, groups of 32, f16 scales:             scale * (q - 8)
    Q4_1, Q4_K     Int4, groups of 32, scales and minimums:    scale * q + minimum
    GPTQ, AWQ      Int4, groups of 64/128, integer zero point: scale * (q - zero)

Arithmetic of `dense()` is float32, in the order written above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "u8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight is stored, known before any of its data: what planning and `inspect` read.

    `scale` and `offset` are the number formats of the groups' scales and of what shifts them: "" for
    none (symmetric), "u8" for integer zero points, "f16"/"f32" for minimums.
    """

    kind: Literal["bf16", "f16", "f32", "int8", "int4"]
    group_size: int = 0
    scale: Literal["", "f16", "f32"] = ""
    offset: Literal["", "u8", "f16", "f32"] = ""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight of this shape, the same as the loaded weight's own `nbytes`."""
        if self.kind in DTYPES:
            return math.prod(shape) * DTYPES[self.kind].itemsize
        rows, width = math.prod(shape[:-1]), shape[-1]
        group = DTYPES[self.scale].itemsize + (DTYPES[self.offset].itemsize if self.offset else 0)
        values = width if self.kind == "int8" else _ceil(width, 2)
        return rows * (values + _ceil(width, self.group_size) * group)

    def __str__(self) -> str:
        if self.kind in DTYPES:
            return self.kind
        shift = {"": "", "u8": ", zero points"}.get(self.offset, f", {self.offset} minimums")
        return f"{self.kind} (groups of {self.group_size}, {self.scale} scales{shift})"


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Numbers as the checkpoint has them: bfloat16, float16 or float32, of any shape."""

    array: Array

    def __post_init__(self) -> None:
        _require(self.array.dtype in _NAMES and self.array.dtype != np.uint8, "Dense takes bf16, f16 or f32")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def storage(self) -> Storage:
        return Storage(_NAMES[self.array.dtype])  # type: ignore[arg-type]

    def dense(self) -> Floats:
        return to_float32(self.array)

    def rows(self, ids: Array) -> Floats:
        """Rows `ids` [n] of a matrix as float32, [n, in]."""
        return to_float32(self.array[ids])

    def slice(self, axis: int, start: int, stop: int) -> Dense:
        """The part [start, stop) along the outputs (axis -2) or the inputs (axis -1, also of vectors)."""
        return Dense(_cut(self.array, axis, start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """scale * q: `values` int8 [..., out, in], `scales` f16 or f32 [..., out, groups of the row]."""

    values: Array
    scales: Array
    group_size: int

    def __post_init__(self) -> None:
        _require(self.values.dtype == np.int8, "the values of Int8 are int8")
        _check_groups(self.shape, self.group_size, self.scales, "f16", "f32")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def storage(self) -> Storage:
        return Storage("int8", self.group_size, _NAMES[self.scales.dtype])  # type: ignore[arg-type]

    def dense(self) -> Floats:
        return self.values.astype(np.float32) * _spread(self.scales, self.group_size, self.shape[-1])

    def rows(self, ids: Array) -> Floats:
        """Rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""
        return Int8(self.values[ids], self.scales[ids], self.group_size).dense()

    def slice(self, axis: int, start: int, stop: int) -> Int8:
        """The part [start, stop) along the outputs (axis -2) or the inputs (axis -1, whole groups)."""
        values, groups = _cut(self.values, axis, start, stop), (start, stop)
        if axis == -1:
            groups = _whole_groups(start, stop, self.shape[-1], self.group_size)
        return Int8(values, _cut(self.scales, axis, *groups), self.group_size)


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    """q in 0..15: `scale * (q - 8)`, or with a minimum or zero point for each group.

    `packed` uint8 [..., out, ceil(in / 2)]: inputs 2i and 2i + 1 in the low and high half of byte i.
    `scales` f16 or f32 [..., out, groups of the row]; of the same shape and at most one of `minimums`
    (f16 or f32, `scale * q + minimum`) and `zeros` (uint8, `scale * (q - zero)`). `width` is `in`.
    """

    packed: Array
    scales: Array
    group_size: int
    width: int
    minimums: Array | None = None
    zeros: Array | None = None

    def __post_init__(self) -> None:
        _require(self.packed.dtype == np.uint8, "the packed values of Int4 are uint8")
        _require(self.packed.shape[-1] == _ceil(self.width, 2), "Int4 packs two values in a byte")
        _require(self.group_size % 2 == 0, "groups of Int4 begin at whole bytes")
        _require(self.minimums is None or self.zeros is None, "either minimums or zeros")
        _check_groups(self.shape, self.group_size, self.scales, "f16", "f32")
        if self.minimums is not None:
            _check_groups(self.shape, self.group_size, self.minimums, "f16", "f32")
        if self.zeros is not None:
            _check_groups(self.shape, self.group_size, self.zeros, "u8")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.packed, self.scales, self.minimums, self.zeros) if a is not None)

    @property
    def storage(self) -> Storage:
        offset = self.minimums if self.minimums is not None else self.zeros
        names = _NAMES[self.scales.dtype], "" if offset is None else _NAMES[offset.dtype]
        return Storage("int4", self.group_size, *names)  # type: ignore[arg-type]

    def dense(self) -> Floats:
        q = unpack(self.packed, self.width).astype(np.float32)
        scale = _spread(self.scales, self.group_size, self.width)
        if self.minimums is not None:
            return scale * q + _spread(self.minimums, self.group_size, self.width)
        if self.zeros is not None:
            return scale * (q - _spread(self.zeros, self.group_size, self.width))
        return scale * (q - np.float32(8))

    def rows(self, ids: Array) -> Floats:
        """Rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""
        offsets = [None if a is None else a[ids] for a in (self.minimums, self.zeros)]
        return Int4(self.packed[ids], self.scales[ids], self.group_size, self.width, *offsets).dense()

    def slice(self, axis: int, start: int, stop: int) -> Int4:
        """The part [start, stop) along the outputs (axis -2) or the inputs (axis -1, whole groups)."""
        packed, groups, width = (start, stop), (start, stop), self.width
        if axis == -1:
            groups = _whole_groups(start, stop, self.width, self.group_size)
            packed, width = (start // 2, _ceil(stop, 2)), stop - start
        offsets = [None if a is None else _cut(a, axis, *groups) for a in (self.minimums, self.zeros)]
        scales = _cut(self.scales, axis, *groups)
        return Int4(_cut(self.packed, axis, *packed), scales, self.group_size, width, *offsets)


def pack(q: Array) -> Array:
    """Integers 0..15 [..., in] two to a byte, [..., ceil(in / 2)]: the even one in the low half."""
    packed = q[..., ::2].astype(np.uint8)
    packed[..., : q.shape[-1] // 2] |= q[..., 1::2].astype(np.uint8) << 4
    return packed


def unpack(packed: Array, width: int) -> Array:
    """The inverse of `pack`: uint8 0..15, [..., width]."""
    q = np.empty((*packed.shape[:-1], width), np.uint8)
    q[..., ::2] = packed & 15
    q[..., 1::2] = packed[..., : width // 2] >> 4
    return q


def to_float32(array: Array) -> Floats:
    """bf16, f16 or f32 as float32, exactly; a float32 array is returned itself."""
    if array.dtype == DTYPES["bf16"]:
        # bf16 is the upper half of a float32. Shifting holds no interpreter lock; the generic cast does.
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _spread(per_group: Array, group_size: int, width: int) -> Floats:
    """[..., groups] -> [..., width]: each group's number for each of its inputs."""
    return np.repeat(per_group.astype(np.float32), group_size, axis=-1)[..., :width]


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    size = array.shape[axis]
    _require(axis in (-1, -2), f"a weight is cut along axis -2 or -1, not {axis}")
    _require(0 <= start <= stop <= size, f"cut [{start}, {stop}) outside of {size}")
    return array[..., start:stop] if axis == -1 else array[..., start:stop, :]


def _whole_groups(start: int, stop: int, width: int, group_size: int) -> tuple[int, int]:
    whole = start % group_size == 0 and (stop % group_size == 0 or stop == width)
    _require(whole, f"cut [{start}, {stop}) of {width} inputs goes through a group of {group_size}")
    return start // group_size, _ceil(stop, group_size)


def _check_groups(shape: tuple[int, ...], group_size: int, per_group: Array, *dtypes: str) -> None:
    _require(group_size > 0, "a group has at least one input")
    _require(_NAMES.get(per_group.dtype) in dtypes, f"numbers of a group are {' or '.join(dtypes)}")
    expected = (*shape[:-1], _ceil(shape[-1], group_size))
    _require(per_group.shape == expected, f"numbers of groups have shape {per_group.shape}, not {expected}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
