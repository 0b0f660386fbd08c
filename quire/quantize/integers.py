"""The kinds of integers in groups: Int8 and Int4. Foreign formats map onto them without loss.

    quantized here  Int8, Int4, groups of 32, 8-bit scales:    (channel * code) * q, q - 8 for Int4
    Q8_0           Int8, groups of 32, f16 scales
    Q4_0           Int4, groups of 32, f16 scales:             scale * (q - 8)
    Q4_1, Q4_K     Int4, groups of 32, scales and minimums:    scale * q + minimum
    GPTQ, AWQ      Int4, groups of 64/128, integer zero point: scale * (q - zero)

where `code` is an int8 of the group and `channel` a float32 of the output: so the scales are integers
within a product, and only its sum is a float.

A product rounds activations to int8 too, 128 inputs of a row with one scale. Where weights are Int8, 32 of
them have a code as well (`coded_rows`), as the weights have, since quality takes as much; where they are
Int4, their own rounding hides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quire.quantize.groups import GroupWeight, ceil_div
from quire.quantize.kinds import Array, require


@dataclass(frozen=True, eq=False)
class Int8(GroupWeight):
    """scale * q: `values` int8 [..., out, in], `scales` [..., out, groups of the row]."""

    kind: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    values_in: ClassVar[str] = "values"
    coded_rows: ClassVar[bool] = True

    values: Array
    scales: Array
    group_size: int
    channel_scales: Array | None = None

    def __post_init__(self) -> None:
        require(self.values.dtype == np.int8, "the values of Int8 are int8")
        self._check()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def integers(self) -> Array:
        return self.values


@dataclass(frozen=True, eq=False)
class Int4(GroupWeight):
    """q in 0..15: `scale * (q - 8)`, or with a minimum or zero point for each group.

    `packed` uint8 [..., out, ceil(in / 2)]: inputs 2i and 2i + 1 in the low and high half of byte i.
    `scales` [..., out, groups of the row], f16 or f32; of the same shape and at most one of `minimums`
    (f16 or f32, `scale * q + minimum`) and `zeros` (uint8, `scale * (q - zero)`). `width` is `in`.
    Or the scales are int8, and nothing shifts.
    """

    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    values_in: ClassVar[str] = "packed"
    zero: ClassVar[int] = 8

    packed: Array
    scales: Array
    group_size: int
    width: int
    minimums: Array | None = None
    zeros: Array | None = None
    channel_scales: Array | None = None

    def __post_init__(self) -> None:
        require(self.packed.dtype == np.uint8, "the packed values of Int4 are uint8")
        require(self.packed.shape[-1] == ceil_div(self.width, 2), "Int4 packs two values in a byte")
        require(self.group_size % 2 == 0, "groups of Int4 begin at whole bytes")
        self._check()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.width)

    def integers(self) -> Array:
        return unpack(self.packed, self.width)

    def _of_width(self, width: int) -> dict[str, Any]:
        return {"width": width}


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
