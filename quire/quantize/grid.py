"""Integers with one floating point scale for each group of inputs, symmetric about zero: W = scale * q.

The choice of scales is aware of activations: errors are weighted by how large the inputs are that meet them
(the observation of AWQ, arXiv:2306.00978), and a scale may be negative, so that the integer without a
counterpart, -2^(bits - 1), is used on the side of the largest weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.quantize.kinds import Array, Floats, to_float32

# Multiples of the scale that maps the largest magnitude of a group to -2^(bits - 1).
_FACTORS = tuple(np.float32(f) for f in (1.0, 0.95, 8 / 7, 0.9, -1.0, 0.85, 0.8))
_SMALLEST = np.float32(2.0**-24)  # the smallest scale, which float16 represents


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers of `bits` bits; `group` inputs share a scale of the number format `scale_dtype`."""

    bits: int
    group: int
    scale_dtype: np.dtype[Any]

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, rows: int, width: int) -> int:
        """Return the bytes of a matrix with its scales."""
        return rows * (-(-width * self.bits // 8) + width // self.group * self.scale_dtype.itemsize)

    def scales(self, values: Array) -> Floats:
        """Round scales to their number format; none is zero or infinite, since codes are divided by them."""
        most = np.float32(65504) if self.scale_dtype == np.float16 else np.float32(3e38)
        sign = np.where(values < 0, np.float32(-1), np.float32(1))
        bounded = sign * np.clip(np.abs(values), _SMALLEST, most)
        return to_float32(bounded.astype(np.float32).astype(self.scale_dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A matrix on a grid: integers `codes` int8 [out, in], `scales` float32 [out, groups]."""

    grid: Grid
    codes: Array
    scales: Floats

    def dense(self) -> Floats:
        """Return scale * code, float32 [out, in]."""
        groups = self.codes.reshape(*self.scales.shape, self.grid.group)
        return (self.scales[..., None] * groups.astype(np.float32)).reshape(self.codes.shape)


def nearest(weight: Floats, grid: Grid, importance: Array | None = None) -> Rounded:
    """Round a matrix [out, in] to the nearest numbers of its grid.

    The scale of a group has the least squared error of a few; `importance` [in] weights the errors, such as
    the mean squares of the inputs.
    """
    scales = best_scales(weight, grid, importance)
    groups = weight.reshape(*scales.shape, grid.group)
    codes = np.clip(np.rint(groups / scales[..., None]), grid.low, grid.high)
    return Rounded(grid, codes.astype(np.int8).reshape(weight.shape), scales)


def best_scales(weight: Floats, grid: Grid, importance: Array | None = None) -> Floats:
    """Return the scales [out, groups] with the least (weighted) squared error of those tried."""
    groups = weight.reshape(len(weight), -1, grid.group)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    weights = None if importance is None else importance.astype(np.float32).reshape(-1, grid.group)
    best, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for factor in _FACTORS:
        scales = grid.scales(largest * (factor / np.float32(grid.low)))
        rest = np.rint(groups / scales[..., None])
        np.clip(rest, grid.low, grid.high, out=rest)
        rest *= scales[..., None]
        rest -= groups
        np.square(rest, out=rest)
        error = rest.sum(-1) if weights is None else np.einsum("ogi,gi->og", rest, weights)
        better = error < least
        best, least = np.where(better, scales, best), np.where(better, error, least)
    return np.where(best == 0, grid.scales(best), best)
