"""Mixed: the matrices of a layer's experts, each in a storage kind of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.program.program import Quantized
from quire.quantize.kinds import Array, Floats, Storage, StoredWeight, Which


@dataclass(frozen=True, slots=True)
class MixedStorage:
    """Matrices along a first axis, of these kinds in order."""

    kinds: tuple[Storage, ...]

    @property
    def kind(self) -> str:
        return "mixed"

    @property
    def is_float(self) -> bool:
        return False

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return sum(kind.nbytes(shape[1:]) for kind in self.kinds)

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        return max(kind.product_bytes(shape[1:]) for kind in self.kinds)

    def __str__(self) -> str:
        counts = Counter(map(str, self.kinds))
        return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


@dataclass(frozen=True, eq=False)
class Mixed(StoredWeight):
    """Matrices [out, in] of one shape, each stored in its own way: [experts, out, in]."""

    parts: tuple[StoredWeight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def storage(self) -> MixedStorage:
        return MixedStorage(tuple(part.storage for part in self.parts))

    def dense(self) -> Floats:
        return np.stack([part.dense() for part in self.parts])

    def __getitem__(self, expert: int) -> Array | Quantized:
        """Return the matrix of an expert, as float32 if it is of floats."""
        part = self.parts[expert]
        return part if isinstance(part, Quantized) else part.dense()

    def product(self, x: Floats) -> Floats:
        raise ValueError("only the matrix of an expert is multiplied")

    def rows(self, ids: Array) -> Floats:
        raise ValueError("only a matrix has rows")

    def outputs(self, which: Which, axis: int = -2) -> Mixed:
        return Mixed(tuple(part.outputs(which, axis) for part in self.parts))

    def split(self, count: int) -> Mixed:
        raise ValueError("only a matrix has outputs of heads")

    def transposed(self) -> Mixed:
        return Mixed(tuple(part.transposed() for part in self.parts))

    @classmethod
    def stack(cls, parts: Sequence[Mixed]) -> Mixed:
        if len(parts) != 1:
            raise ValueError("experts of different kinds are one weight already")
        return parts[0]
