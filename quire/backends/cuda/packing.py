"""The layout of weights of integers for kernels: whole spans, scales by group, 4 bits by pairs of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.program.numerics import GROUP, SPAN
from quire.quantize.integers import Int4, Int8


@dataclass(frozen=True)
class PackedIntegers:
    """A matrix for kernels.quantized: inputs padded with zeros to `spans` of 128.

    `values` are int8 [..., outputs, spans * 128], or of 4 bits uint8 [..., outputs, spans * 64]: of each 64
    inputs the first 32 in the low halves of 32 bytes, the others in the high ones, so that a group is a row
    of bytes with one shift. `scales` int8 [..., spans * 4, padded(outputs)] are by group, so that
    neighbouring outputs are read together; `channels` float32 [..., outputs].
    """

    values: np.ndarray
    scales: np.ndarray
    channels: np.ndarray

    @property
    def spans(self) -> int:
        return self.scales.shape[-2] * GROUP // SPAN


def padded(outputs: int) -> int:
    """Return the length of a row of scales, as kernels.tiles: what is beyond the outputs is never used."""
    return -(-outputs // 16) * 16


def packed(weight: Int8 | Int4) -> PackedIntegers:
    """Return the same integers and scales in the layout of the kernels."""
    *outer, inputs = weight.shape
    spans = -(-inputs // SPAN)
    codes, own = weight.integers(), weight.scales
    values = np.full((*outer, spans * SPAN), weight.zero, codes.dtype)
    values[..., :inputs] = codes
    if not isinstance(weight, Int8):
        pairs = values.reshape(*outer, -1, 2, GROUP)
        values = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*outer, -1)
    *matrices, outputs = outer
    scales = np.zeros((*matrices, spans * SPAN // GROUP, padded(outputs)), own.dtype)
    scales[..., : own.shape[-1], :outputs] = own.swapaxes(-1, -2)
    return PackedIntegers(np.ascontiguousarray(values), scales, np.ascontiguousarray(weight.channel_scales))


def packed_shapes(kind: str, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
    """Return shape and type of values, scales and channels of a packed weight of this kind and shape."""
    *outer, outputs, inputs = shape
    spans = -(-inputs // SPAN)
    eight = kind == Int8.kind
    row = spans * SPAN if eight else spans * SPAN // 2
    return (
        ((*outer, outputs, row), np.dtype(np.int8 if eight else np.uint8)),
        ((*outer, spans * SPAN // GROUP, padded(outputs)), np.dtype(np.int8)),
        ((*outer, outputs), np.dtype(np.float32)),
    )
