"""Storage kinds of weights: their common interface, and floating point numbers as in the checkpoint.

A kind is two classes in its own file: a `Storage`, known before any data is read, which computes the bytes of
a weight; and a `StoredWeight`, the data and its meaning in NumPy. Loading, planning and backends use only the
interface declared here. `integers.py` has integers with block scales.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Which: TypeAlias = slice | list[int]  # the indices of some outputs
W = TypeVar("W", bound="StoredWeight")

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Storage(Protocol):
    """The storage kind of a weight, known before its data: used for planning and by `inspect`.

    Equal ones are interchangeable; `str` gives a readable name. `is_float` is True for unmodified floating
    point numbers: such weights may be quantized while loading.
    """

    @property
    def kind(self) -> str:
        """The name: a number format of DTYPES, or that of the kind."""
        ...

    @property
    def is_float(self) -> bool: ...

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape, equal to `nbytes` of the loaded weight."""
        ...

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the approximate bytes that `product` needs besides the weight, for a single row."""
        ...


class StoredWeight(ABC):
    """A loaded weight of one storage kind: [..., out, in], or a vector. Derived weights are views.

    A kind that multiplies quantized activations also has `product` and `[expert]` (quire.program Quantized).
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    @abstractmethod
    def storage(self) -> Storage: ...

    @abstractmethod
    def dense(self) -> Floats:
        """Return the values as float32, exactly as the kind defines them."""

    @abstractmethod
    def rows(self, ids: Array) -> Floats:
        """Return rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""

    @abstractmethod
    def outputs(self: W, which: Which, axis: int = -2) -> W:
        """Select outputs; those of vectors and biases are along axis -1."""

    @abstractmethod
    def split(self: W, count: int) -> W:
        """Split the outputs of a matrix into `count` equal parts, [count, out, in]."""

    @abstractmethod
    def transposed(self: W) -> W:
        """Swap the last two axes. Raises ValueError if the kind would need to be requantized."""

    @classmethod
    @abstractmethod
    def stack(cls: type[W], parts: Sequence[W]) -> W:
        """Join weights of this class and of one shape along a new first axis; a single one is unchanged.

        The arrays of the result are contiguous.
        """

    def floats(self) -> Array:
        """Return the values as floating point numbers, in the stored format if it is one."""
        return self.dense()


@dataclass(frozen=True, slots=True)
class FloatStorage:
    """Floating point numbers as in the checkpoint: "bf16", "f16" or "f32"."""

    kind: str

    @property
    def is_float(self) -> bool:
        return True

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * DTYPES[self.kind].itemsize

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        return 0

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class Dense(StoredWeight):
    """Numbers as in the checkpoint: bfloat16, float16 or float32, of any shape."""

    array: Array

    def __post_init__(self) -> None:
        require(self.array.dtype in DTYPE_NAMES, "Dense takes bf16, f16 or f32")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def storage(self) -> FloatStorage:
        return FloatStorage(DTYPE_NAMES[self.array.dtype])

    def dense(self) -> Floats:
        return to_float32(self.array)

    def floats(self) -> Array:
        return self.array

    def rows(self, ids: Array) -> Floats:
        return to_float32(self.array[ids])

    def outputs(self, which: Which, axis: int = -2) -> Dense:
        return Dense(self.array[..., which] if axis == -1 else self.array[..., which, :])

    def split(self, count: int) -> Dense:
        return Dense(self.array.reshape(count, -1, self.array.shape[-1]))

    def transposed(self) -> Dense:
        return Dense(self.array.swapaxes(-1, -2))

    @classmethod
    def stack(cls, parts: Sequence[Dense]) -> Dense:
        """Join weights; different number formats become float32, which represents all of them."""
        if len(parts) == 1:
            return Dense(np.ascontiguousarray(parts[0].array))
        formats = {part.array.dtype for part in parts}
        dtype = formats.pop() if len(formats) == 1 else DTYPES["f32"]
        stacked = np.empty((len(parts), *parts[0].shape), dtype)
        for number, part in enumerate(parts):
            stacked[number] = part.array if part.array.dtype == dtype else part.dense()
        return Dense(stacked)


def to_float32(array: Array) -> Floats:
    """Convert bf16, f16 or f32 to float32, exactly; a float32 array is returned itself."""
    if array.dtype == DTYPES["bf16"]:
        # bf16 is the upper half of a float32. Shifting releases the interpreter lock; the generic cast does
        # not.
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless a condition on the arrays of a weight holds."""
    if not condition:
        raise ValueError(message)
