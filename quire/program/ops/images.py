"""Images: patches and where they are, as the batch brings them; the embeddings of images among tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightBytes, WeightSpec


@dataclass(frozen=True, slots=True)
class Patches(Op):
    """out[t] = what the batch brings for patch t of an image: numbers of its pixels, and of its place."""

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        if run.batch.patches is None:
            raise ValueError("this batch brings no patches")
        return run.batch.patches


@dataclass(frozen=True, slots=True)
class MixedRows(Op):
    """out[t] = the sum of w[j] * table[i[j]] over j, in order.

    table [rows, width]; places [T, 2 n] are n rows i, whole numbers, then n factors w. Positions interpolated
    in a grid are such a mix.
    """

    places: Value
    table: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.table,)

    def flops(self, load: Load) -> float:
        return load.num_tokens * self.places.width * self.out.width

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        return nbytes(self.table) * load.num_tokens * self.places.width / 2 / self.table.shape[0]

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        number = self.places.width // 2
        rows, factors = inputs[0][:, :number].astype(np.int64), inputs[0][:, number:]
        table = run.weights[self.table.name]
        out = factors[:, :1] * table[rows[:, 0]]
        for j in range(1, number):
            out = out + factors[:, j, None] * table[rows[:, j]]
        return out


@dataclass(frozen=True, slots=True)
class RotaryAt(Op):
    """out = x [T, heads, dim], pairs (i, i + dim / 2) of each head rotated by the places [T, axes] of tokens.

    Each axis has an equal part of the pairs, one after the other. The angle of the k-th pair of an axis is
    the place on it times theta^(-k / pairs of the axis), rounded to float32 as in Rotary.
    """

    x: Value
    places: Value
    theta: float

    def flops(self, load: Load) -> float:
        return 3 * load.size(self.out.count) * self.x.width

    def frequencies(self) -> Array:
        """Return radians per place, [pairs of an axis] float32."""
        pairs = self.x.shape[1] // 2 // self.places.width
        exponents = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
        return (1.0 / np.power(self.theta, exponents.astype(np.float64))).astype(np.float32)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, places = inputs
        angles = (places[:, :, None] * self.frequencies()).astype(np.float64).reshape(len(x), 1, -1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclass(frozen=True, slots=True)
class JoinRows(Op):
    """out [L, n * width] = rows of x [T, width], n of them after one another in each row.

    T = n L, or more: later rows, such as that of a class, are left out.
    """

    x: Value

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        number = self.out.width // self.x.width
        return inputs[0][: number * len(run.batch.logit_rows)].reshape(-1, self.out.width)


@dataclass(frozen=True, slots=True)
class MeanOfRows(Op):
    """out[l] = the mean of rows l * n ... (l + 1) * n - 1 of x [T, width], T = n L, summed in float64."""

    x: Value
    number: int

    def flops(self, load: Load) -> float:
        return load.num_tokens * self.x.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        groups = inputs[0].reshape(-1, self.number, self.x.width)
        return (np.add.reduce(groups, axis=1, dtype=np.float64) / self.number).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PlaceImages(Op):
    """out = x [T, width], but columns `first` ... of what the batch brings for the tokens of images.

    With `added`, x plus these columns.
    """

    x: Value
    first: int
    added: bool = False

    def flops(self, load: Load) -> float:
        return load.num_tokens * self.x.width if self.added else 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        batch, out = run.batch, inputs[0].copy()
        if batch.image_embeddings is not None:
            own = batch.image_embeddings[:, self.first : self.first + self.x.width].reshape(-1, *self.x.shape)
            out[batch.image_tokens] = out[batch.image_tokens] + own if self.added else own
        return out
