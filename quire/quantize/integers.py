"""The kinds of integers with 8-bit block scales: Int8 and Int4.

    Int8    (channel scale * block scale) * q
    Int4    (channel scale * block scale) * (q - 8)

The block scale is an int8 of 32 inputs and the channel scale a float32 of the output: so the scales are
integers within a product, and only its sum is a float.

A product also rounds activations to int8, with one scale for 128 inputs of a row. For Int8 weights each 32 of
them have a block scale too (`block_scaled_rows`), which quality needs; for Int4 weights the error of the
weights dominates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quire.quantize.groups import GroupWeight, ceil_div
from quire.quantize.kinds import Array, require


@dataclass(frozen=True, eq=False)
class Int8(GroupWeight):
    """Integers -128 to 127: `values` int8 [..., out, in]."""

    kind: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    values_in: ClassVar[str] = "values"
    block_scaled_rows: ClassVar[bool] = True

    values: Array
    scales: Array
    channel_scales: Array

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
    """Integers 0 to 15, where 8 represents 0; `width` is `in`.

    `packed` uint8 [..., out, ceil(in / 2)]: inputs 2i and 2i + 1 in the low and high half of byte i.
    """

    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    values_in: ClassVar[str] = "packed"
    zero: ClassVar[int] = 8

    packed: Array
    scales: Array
    channel_scales: Array
    width: int

    def __post_init__(self) -> None:
        require(self.packed.dtype == np.uint8, "the packed values of Int4 are uint8")
        require(self.packed.shape[-1] == ceil_div(self.width, 2), "Int4 packs two values in a byte")
        self._check()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.width)

    def integers(self) -> Array:
        return unpack(self.packed, self.width)


def pack(q: Array) -> Array:
    """Pack integers 0..15 [..., in] two to a byte, [..., ceil(in / 2)], even ones in the low half."""
    packed = q[..., ::2].astype(np.uint8)
    packed[..., : q.shape[-1] // 2] |= q[..., 1::2].astype(np.uint8) << 4
    return packed


def unpack(packed: Array, width: int) -> Array:
    """Invert `pack`: return uint8 0..15, [..., width]."""
    q = np.empty((*packed.shape[:-1], width), np.uint8)
    q[..., ::2] = packed & 15
    q[..., 1::2] = packed[..., : width // 2] >> 4
    return q
