"""Storage kinds of weights: few, and every foreign format maps onto one of them without loss.

`Dense` keeps the checkpoint's floating point numbers. `Int8` and `Int4` keep integers with one scale for
each group of consecutive inputs of one output row; the last group of a row may be shorter than the
others, so any row length can be stored. A group as long as the row is one scale per output channel.
Scales have two levels, or one:

    quantized here  Int8, Int4, groups of 32, 8-bit scales:    (channel * code) * q, q - 8 for Int4
    Q8_0           Int8, groups of 32, f16 scales
    Q4_0           Int4, groups of 32, f16 scales:             scale * (q - 8)
    Q4_1, Q4_K     Int4, groups of 32, scales and minimums:    scale * q + minimum
    GPTQ, AWQ      Int4, groups of 64/128, integer zero point: scale * (q - zero)

where `code` is an int8 of the group and `channel` a float32 of the output: so the scales are integers
within a product, and only its sum is a float. Arithmetic of `dense()` is float32, in the order written above.

A product rounds activations to int8 too, 128 inputs of a row with one scale. Where weights are Int8, 32 of
them have a code as well (`coded_rows`), as the weights have, since quality takes as much; where they are
Int4, their own rounding hides the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import ml_dtypes
import numpy as np

from quire.program.numerics import GROUP, quantized_matmul

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "u8": np.dtype(np.uint8),
}
_CODES = "i8"  # the format of scales that are integers, in units of a scale of their output
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.int8): _CODES}
_FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight is stored, known before any of its data: what planning and `inspect` read.

    `scale` and `offset` are the number formats of the groups' scales ("i8": integers, with one f32 for
    each output) and of what shifts them: "" for none (symmetric), "u8" for integer zero points,
    "f16"/"f32" for minimums.
    """

    kind: Literal["bf16", "f16", "f32", "int8", "int4"]
    group_size: int = 0
    scale: Literal["", "i8", "f16", "f32"] = ""
    offset: Literal["", "u8", "f16", "f32"] = ""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight of this shape, the same as the loaded weight's own `nbytes`."""
        if self.kind in DTYPES:
            return math.prod(shape) * DTYPES[self.kind].itemsize
        rows, width = math.prod(shape[:-1]), shape[-1]
        group = 1 if self.scale == _CODES else DTYPES[self.scale].itemsize
        group += DTYPES[self.offset].itemsize if self.offset else 0
        values = width if self.kind == "int8" else _ceil(width, 2)
        row = values + _ceil(width, self.group_size) * group + (4 if self.scale == _CODES else 0)
        return rows * row

    def __str__(self) -> str:
        if self.kind in DTYPES:
            return self.kind
        shift = {"": "", "u8": ", zero points"}.get(self.offset, f", {self.offset} minimums")
        scale = "8-bit" if self.scale == _CODES else self.scale
        return f"{self.kind} (groups of {self.group_size}, {scale} scales{shift})"


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Numbers as the checkpoint has them: bfloat16, float16 or float32, of any shape."""

    array: Array

    def __post_init__(self) -> None:
        _require(_NAMES.get(self.array.dtype) in _FLOATS, "Dense takes bf16, f16 or f32")

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
    """scale * q: `values` int8 [..., out, in], `scales` [..., out, groups of the row].

    The scales are f16 or f32; or int8, -127 to 127, in units of `channel_scales` f32 [..., out].
    """

    coded_rows: ClassVar[bool] = True

    values: Array
    scales: Array
    group_size: int
    channel_scales: Array | None = None

    def __post_init__(self) -> None:
        _require(self.values.dtype == np.int8, "the values of Int8 are int8")
        _check_scales(self.shape, self.group_size, self.scales, self.channel_scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.values, self.scales, self.channel_scales)

    @property
    def storage(self) -> Storage:
        return Storage("int8", self.group_size, _NAMES[self.scales.dtype])  # type: ignore[arg-type]

    def dense(self) -> Floats:
        scale = _scale(self.scales, self.channel_scales)
        return self.values.astype(np.float32) * _spread(scale, self.group_size, self.shape[-1])

    def rows(self, ids: Array) -> Floats:
        """Rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""
        return self[ids].dense()

    def product(self, x: Floats) -> Floats:
        """x [T, in] times the matrix transposed, [T, out]: see `quantized_matmul`."""
        return _product(x, self.values, self)

    def __getitem__(self, index: Any) -> Int8:
        """Some of the first axis: an expert of [experts, out, in], or outputs of a matrix."""
        return Int8(self.values[index], self.scales[index], self.group_size, _at(self.channel_scales, index))

    def slice(self, axis: int, start: int, stop: int) -> Int8:
        """The part [start, stop) along the outputs (axis -2) or the inputs (axis -1, whole groups)."""
        values, groups = _cut(self.values, axis, start, stop), (start, stop)
        if axis == -1:
            groups = _whole_groups(start, stop, self.shape[-1], self.group_size)
        channels = _cut_channels(self.channel_scales, axis, start, stop)
        return Int8(values, _cut(self.scales, axis, *groups), self.group_size, channels)


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    """q in 0..15: `scale * (q - 8)`, or with a minimum or zero point for each group.

    `packed` uint8 [..., out, ceil(in / 2)]: inputs 2i and 2i + 1 in the low and high half of byte i.
    `scales` [..., out, groups of the row], f16 or f32; of the same shape and at most one of `minimums`
    (f16 or f32, `scale * q + minimum`) and `zeros` (uint8, `scale * (q - zero)`). `width` is `in`.
    Or the scales are int8, -127 to 127, in units of `channel_scales` f32 [..., out], and nothing shifts.
    """

    coded_rows: ClassVar[bool] = False

    packed: Array
    scales: Array
    group_size: int
    width: int
    minimums: Array | None = None
    zeros: Array | None = None
    channel_scales: Array | None = None

    def __post_init__(self) -> None:
        _require(self.packed.dtype == np.uint8, "the packed values of Int4 are uint8")
        _require(self.packed.shape[-1] == _ceil(self.width, 2), "Int4 packs two values in a byte")
        _require(self.group_size % 2 == 0, "groups of Int4 begin at whole bytes")
        offsets = (self.minimums, self.zeros, self.channel_scales)
        _require(sum(a is not None for a in offsets) <= 1, "either minimums, zeros or 8-bit scales")
        _check_scales(self.shape, self.group_size, self.scales, self.channel_scales)
        if self.minimums is not None:
            _check_groups(self.shape, self.group_size, self.minimums, "f16", "f32")
        if self.zeros is not None:
            _check_groups(self.shape, self.group_size, self.zeros, "u8")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.packed, self.scales, self.minimums, self.zeros, self.channel_scales)

    @property
    def storage(self) -> Storage:
        offset = self.minimums if self.minimums is not None else self.zeros
        names = _NAMES[self.scales.dtype], "" if offset is None else _NAMES[offset.dtype]
        return Storage("int4", self.group_size, *names)  # type: ignore[arg-type]

    def dense(self) -> Floats:
        q = unpack(self.packed, self.width).astype(np.float32)
        scale = _spread(_scale(self.scales, self.channel_scales), self.group_size, self.width)
        if self.minimums is not None:
            return scale * q + _spread(self.minimums, self.group_size, self.width)
        if self.zeros is not None:
            return scale * (q - _spread(self.zeros, self.group_size, self.width))
        return scale * (q - np.float32(8))

    def rows(self, ids: Array) -> Floats:
        """Rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""
        return self[ids].dense()

    def product(self, x: Floats) -> Floats:
        """x [T, in] times the matrix transposed, [T, out]: see `quantized_matmul`."""
        return _product(x, unpack(self.packed, self.width).view(np.int8) - np.int8(8), self)

    def __getitem__(self, index: Any) -> Int4:
        """Some of the first axis: an expert of [experts, out, in], or outputs of a matrix."""
        others = [_at(a, index) for a in (self.minimums, self.zeros, self.channel_scales)]
        return Int4(self.packed[index], self.scales[index], self.group_size, self.width, *others)

    def slice(self, axis: int, start: int, stop: int) -> Int4:
        """The part [start, stop) along the outputs (axis -2) or the inputs (axis -1, whole groups)."""
        packed, groups, width = (start, stop), (start, stop), self.width
        if axis == -1:
            groups = _whole_groups(start, stop, self.width, self.group_size)
            packed, width = (start // 2, _ceil(stop, 2)), stop - start
        others = [None if a is None else _cut(a, axis, *groups) for a in (self.minimums, self.zeros)]
        others.append(_cut_channels(self.channel_scales, axis, start, stop))
        scales = _cut(self.scales, axis, *groups)
        return Int4(_cut(self.packed, axis, *packed), scales, self.group_size, width, *others)


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


def _product(x: Floats, q: Array, weight: Int8 | Int4) -> Floats:
    if weight.channel_scales is None or weight.group_size != GROUP:
        raise ValueError(f"only weights with 8-bit scales for groups of {GROUP} have an integer product")
    return quantized_matmul(x, q, weight.scales, weight.channel_scales, weight.coded_rows)


def _scale(scales: Array, channel_scales: Array | None) -> Floats:
    """Scales of groups [..., groups] as float32, whether of one level or two."""
    single = scales.astype(np.float32)
    return single if channel_scales is None else channel_scales[..., None] * single


def _spread(per_group: Array, group_size: int, width: int) -> Floats:
    """[..., groups] -> [..., width]: each group's number for each of its inputs."""
    return np.repeat(per_group.astype(np.float32), group_size, axis=-1)[..., :width]


def _nbytes(*arrays: Array | None) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def _at(array: Array | None, index: Any) -> Array | None:
    return None if array is None else array[index]


def _cut_channels(channels: Array | None, axis: int, start: int, stop: int) -> Array | None:
    """What one number for each output becomes when its matrix is cut."""
    return channels if channels is None or axis == -1 else channels[..., start:stop]


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    size = array.shape[axis]
    _require(axis in (-1, -2), f"a weight is cut along axis -2 or -1, not {axis}")
    _require(0 <= start <= stop <= size, f"cut [{start}, {stop}) outside of {size}")
    return array[..., start:stop] if axis == -1 else array[..., start:stop, :]


def _whole_groups(start: int, stop: int, width: int, group_size: int) -> tuple[int, int]:
    whole = start % group_size == 0 and (stop % group_size == 0 or stop == width)
    _require(whole, f"cut [{start}, {stop}) of {width} inputs goes through a group of {group_size}")
    return start // group_size, _ceil(stop, group_size)


def _check_scales(shape: tuple[int, ...], group_size: int, scales: Array, channels: Array | None) -> None:
    _check_groups(shape, group_size, scales, *(("f16", "f32") if channels is None else (_CODES,)))
    if channels is not None:
        _require(channels.dtype == np.float32, "scales of outputs are f32")
        _require(channels.shape == shape[:-1], f"{shape[:-1]} outputs have {channels.shape} scales")


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
