"""Integers with 8-bit block scales: the bytes, rows and values of all such kinds.

Each GROUP inputs of an output share an int8 block scale, and each output has a float32 channel scale. The
last group of a row may be shorter than the others, so any row length can be stored.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from quire.program.numerics import GROUP, quantized_matmul
from quire.quantize.kinds import Array, Floats, StoredWeight, Which, require

G = TypeVar("G", bound="GroupWeight")


@dataclass(frozen=True, slots=True)
class GroupStorage:
    """Integers of `bits` bits with 8-bit block scales."""

    kind: str
    bits: int

    @property
    def is_float(self) -> bool:
        return False

    def nbytes(self, shape: tuple[int, ...]) -> int:
        rows, width = math.prod(shape[:-1]), shape[-1]
        return rows * (self.value_bytes(width) + ceil_div(width, GROUP) + 4)

    def value_bytes(self, width: int) -> int:
        """Return the bytes of the integers of a row."""
        return ceil_div(width * self.bits, 8)

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a group of inputs and three sums as float64 (numerics.quantized_matmul), and of
        unpacked copies of integers that share bytes.
        """
        outputs, inputs = shape[-2:]
        sums = 8 * (min(GROUP, inputs) + 3)
        return outputs * (max(2 * inputs, inputs + sums) if self.bits < 8 else sums)

    def __str__(self) -> str:
        return f"{self.kind} (groups of {GROUP}, 8-bit scales)"


class GroupWeight(StoredWeight):
    """Integers q in groups: (channel scale * block scale) * (q - zero), in float32 and in this order.

    `scales` are the block scales, int8 [..., out, groups], in units of `channel_scales` f32 [..., out]. A
    subclass is a dataclass with these arrays and its own of integers, which `values_in` names; `zero` is the
    integer that stands for 0, and `block_scaled_rows` says how activations are rounded for a product with it
    (numerics.quantized_matmul).
    """

    kind: ClassVar[str]
    bits: ClassVar[int]
    values_in: ClassVar[str]
    zero: ClassVar[int] = 0
    block_scaled_rows: ClassVar[bool] = False

    scales: Array
    channel_scales: Array

    @abstractmethod
    def integers(self) -> Array:
        """Return q unpacked, [..., out, in]."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    @property
    def storage(self) -> GroupStorage:
        return GroupStorage(self.kind, self.bits)

    def dense(self) -> Floats:
        scale = self.channel_scales[..., None] * self.scales.astype(np.float32)
        scale = np.repeat(scale, GROUP, axis=-1)[..., : self.shape[-1]]
        return scale * (self.integers().astype(np.float32) - np.float32(self.zero))

    def rows(self, ids: Array) -> Floats:
        return self[ids].dense()

    def product(self, x: Floats) -> Floats:
        """Return x [T, in] times the matrix transposed, [T, out]: see `quantized_matmul`."""
        q = self.integers().view(np.int8)
        if self.zero:
            q = q - np.int8(self.zero)
        return quantized_matmul(x, q, self.scales, self.channel_scales, self.block_scaled_rows)

    def __getitem__(self: G, index: Any) -> G:
        """Select along the first axis: an expert of [experts, out, in], or outputs of a matrix."""
        return self._with({name: array[index] for name, array in self._arrays().items()})

    def outputs(self: G, which: Which, axis: int = -2) -> G:
        require(axis == -2, f"{self.kind} has no outputs along axis {axis}")
        rows = {name: getattr(self, name)[..., which, :] for name in (self.values_in, "scales")}
        return self._with(rows | {"channel_scales": self.channel_scales[..., which]})

    def split(self: G, count: int) -> G:
        rows = self.shape[0] // count
        return self._with(
            {n: array.reshape(count, rows, *array.shape[1:]) for n, array in self._arrays().items()}
        )

    def transposed(self: G) -> G:
        raise ValueError(f"{self.kind} cannot be transposed: its groups are along the inputs")

    @classmethod
    def stack(cls: type[G], parts: Sequence[G]) -> G:
        if len(parts) == 1:
            return parts[0]._with({n: np.ascontiguousarray(array) for n, array in parts[0]._arrays().items()})
        arrays = [part._arrays() for part in parts]
        return parts[0]._with({name: np.stack([own[name] for own in arrays]) for name in arrays[0]})

    def _arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in (self.values_in, "scales", "channel_scales")}

    def _with(self: G, arrays: dict[str, Array]) -> G:
        return replace(self, **arrays)  # type: ignore[type-var]

    def _check(self) -> None:
        """Raise ValueError unless the arrays match each other."""
        outputs = self.shape[:-1]
        require(self.scales.dtype == np.int8, "block scales are int8")
        require(self.channel_scales.dtype == np.float32, "channel scales are f32")
        for scales, expected in (
            (self.scales, (*outputs, ceil_div(self.shape[-1], GROUP))),
            (self.channel_scales, outputs),
        ):
            require(scales.shape == expected, f"scales have shape {scales.shape}, not {expected}")


def ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)
