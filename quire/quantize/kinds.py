"""Storage kinds of weights: what every one of them offers, and numbers kept as a checkpoint has them.

A kind is two classes in a file of its own: a `Storage`, which is known before any data is and says how many
bytes a weight takes, and a `StoredWeight`, the data and what they mean in NumPy. Loading, planning and
backends use what is declared here and have no `if` for one of them; `integers.py` has integers with
block scales.
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
W = TypeVar("W", bound="StoredWeight")

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Storage(Protocol):
    """How a weight is stored, known before any of its data: what planning and `inspect` read.

    Equal ones are interchangeable; `str` says what it is for people. `is_float` is True for floating point
    numbers kept as they are: such weights may be rounded while loading.
    """

    @property
    def kind(self) -> str:
        """Its name: a number format of DTYPES, or that of the kind."""
        ...

    @property
    def is_float(self) -> bool: ...

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape, the same as the loaded weight's own `nbytes`."""
        ...

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        """Return what `product` takes beside the weight, about, for a single row."""
        ...


class StoredWeight(ABC):
    """A loaded weight of one storage kind: [..., out, in], or a vector. All that is made of it are views.

    A kind that multiplies quantized activations has `product` and `[expert]`, too (quire.program Quantized).
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
        """Return the values as float32, in the arithmetic that defines the kind."""

    @abstractmethod
    def rows(self, ids: Array) -> Floats:
        """Return rows `ids` [n] of a matrix as float32, [n, in]; no other row is expanded."""

    @abstractmethod
    def every(self: W, first: int, step: int, axis: int = -2) -> W:
        """Take every step-th output, from `first` on; of vectors and biases these are along axis -1."""

    @abstractmethod
    def transposed(self: W) -> W:
        """Exchange the last two axes. Raises ValueError where the kind cannot without another rounding."""

    @classmethod
    @abstractmethod
    def stack(cls: type[W], parts: Sequence[W]) -> W:
        """Join weights of one shape, of which each has this class, along a new first axis; of one, itself.

        The arrays of what is returned are contiguous.
        """

    def floats(self) -> Array:
        """Return the values as floating point numbers: as they are stored, where they are such."""
        return self.dense()


@dataclass(frozen=True, slots=True)
class FloatStorage:
    """Floating point numbers as a checkpoint has them: "bf16", "f16" or "f32"."""

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
    """Numbers as the checkpoint has them: bfloat16, float16 or float32, of any shape."""

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

    def every(self, first: int, step: int, axis: int = -2) -> Dense:
        chosen = self.array[..., first::step] if axis == -1 else self.array[..., first::step, :]
        return Dense(chosen)

    def transposed(self) -> Dense:
        return Dense(self.array.swapaxes(-1, -2))

    @classmethod
    def stack(cls, parts: Sequence[Dense]) -> Dense:
        """Weights of several number formats meet in float32, which holds all of them."""
        if len(parts) == 1:
            return Dense(np.ascontiguousarray(parts[0].array))
        formats = {part.array.dtype for part in parts}
        dtype = formats.pop() if len(formats) == 1 else DTYPES["f32"]
        stacked = np.empty((len(parts), *parts[0].shape), dtype)
        for number, part in enumerate(parts):
            stacked[number] = part.array if part.array.dtype == dtype else part.dense()
        return Dense(stacked)


def to_float32(array: Array) -> Floats:
    """bf16, f16 or f32 as float32, exactly; a float32 array is returned itself."""
    if array.dtype == DTYPES["bf16"]:
        # bf16 is the upper half of a float32. Shifting holds no interpreter lock; the generic cast does.
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds: arrays of a weight that do not belong together."""
    if not condition:
        raise ValueError(message)
