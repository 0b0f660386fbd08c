"""Alterations of tensors by converters, besides their names, and their undoing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.quantize.kinds import Array, to_float32


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows or columns that a file has otherwise.

    From `first` on, those of each of `outer` equal parts are there as [count, inner, each] and are needed as
    [inner, count, each], but for the last `rest` of each, which stay.
    """

    inner: int
    each: int = 1
    outer: int = 1
    first: int = 0
    rest: int = 0

    def fits(self, total: int) -> bool:
        """Return True if so many rows can have this order."""
        ordered = total - self.first - self.outer * self.rest
        return ordered >= 0 and ordered % (self.outer * self.inner * self.each) == 0

    def of(self, total: int) -> Array:
        """Return the number in the file of each of the rows that are needed."""
        rows = np.arange(self.first, total).reshape(self.outer, -1)
        ordered, rest = np.split(rows, [rows.shape[1] - self.rest], axis=1)
        ordered = ordered.reshape(self.outer, -1, self.inner, self.each).swapaxes(1, 2)
        both = np.concatenate((ordered.reshape(self.outer, -1), rest), axis=1)
        return np.concatenate((np.arange(self.first), both.reshape(-1)))


@dataclass(frozen=True, slots=True)
class Alteration:
    """The difference between a tensor in a file and the one that the model needs.

    `numbers`: "plus one" is stored plus one, "decay" is the logarithm of A in -exp(A). `form`: a vector that
    is stored with more axes, a scalar with one, a matrix of one row that may be stored as a vector, a kernel
    of a convolution with none or several axes of one channel, one over two frames as a tensor for each, or a
    matrix of the colors of pixels as a kernel [out, 3, height, width]. `transposed`: the last two axes are
    exchanged.
    """

    rows: Order | None = None
    columns: Order | None = None
    numbers: Literal["", "plus one", "decay"] = ""
    form: Literal["", "vector", "scalar", "row", "kernel", "frames", "pixels"] = ""
    transposed: bool = False

    def shaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the model needs of a tensor stored in this one, apart from `transposed`."""
        if self.form == "vector":
            return (math.prod(shape),)
        if self.form == "scalar" and math.prod(shape) == 1:
            return ()
        if self.form == "row":
            return (1, *shape) if len(shape) == 1 else shape
        if self.form == "pixels":
            return (shape[0], math.prod(shape[1:]))
        if self.form == "frames":
            return (*shape[:2], 2, *shape[2:])
        return (math.prod(shape[:-1]), 1, shape[-1]) if self.form == "kernel" else shape

    def restored(self, array: Array) -> Array:
        """Return the numbers that the model needs: the same array, or float32."""
        if not self.numbers:
            return array
        stored = to_float32(array)
        if self.numbers == "plus one":
            return stored - np.float32(1)
        with np.errstate(invalid="ignore", divide="ignore"):  # numbers that no file should have
            return np.asarray(np.log(-stored), np.float32)


PLAIN = Alteration()
