"""Embedding of token ids, positions and segments; selection of rows that need logits, pooling of texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightBytes, WeightSpec

PoolingMethod = Literal["mean", "cls"]


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = table[token_ids[t]], table [vocab, width]. Reads only the rows of the step's tokens.

    Row 0 is that of ids beyond the table, which may have fewer rows than the model has tokens. `in_place`:
    the table is too large to be worth a copy, so a backend may read its rows from the checkpoint. With
    `replaced` (id, same), this id has the row of the id `same`.
    """

    table: WeightSpec
    in_place: bool = False
    replaced: tuple[int, int] | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.table,)

    def flops(self, load: Load) -> float:
        return 0

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        return nbytes(self.table) * load.num_tokens / self.table.shape[0]

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        ids = run.batch.token_ids
        if self.replaced is not None:
            ids = np.where(ids == self.replaced[0], self.replaced[1], ids)
        known = np.where(ids < self.table.shape[0], ids, 0)
        return _rows(run, self.table, known).reshape(len(ids), *self.out.shape)


@dataclass(frozen=True, slots=True)
class PositionEmbed(Embed):
    """out[t] = table[positions[t]], table [positions, hidden] (learned positions, GPT-2)."""

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return _rows(run, self.table, run.batch.positions)


def _rows(run: Run, table: WeightSpec, ids: np.ndarray) -> Array:
    """Return rows `ids` [T] of a table, [T, hidden]."""
    stored = run.matrix(table)
    return stored[ids] if isinstance(stored, np.ndarray) else stored.rows(ids)


@dataclass(frozen=True, slots=True)
class PreviousHidden(Op):
    """out[t] = the hidden states that the model gave for the position before token t, which the batch brings.

    Those before position 0 are zeros.
    """

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        if run.batch.hidden is None:
            raise ValueError("this batch brings no hidden states")
        return run.batch.hidden


@dataclass(frozen=True, slots=True)
class SampledRows(Op):
    """out[l] = x[logit_rows[l]]: later ops compute only rows that need logits."""

    x: Value

    def flops(self, load: Load) -> float:
        return 0

    def activation_bytes(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.row_bytes

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0][run.batch.logit_rows]


@dataclass(frozen=True, slots=True)
class EmbedSegments(Op):
    """out[t] = table[number of `separator` tokens before t in its row], table [segments, width].

    Tokens after more separators than the table has rows get its last one (token types, BERT).
    """

    table: WeightSpec
    separator: int

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.table,)

    def flops(self, load: Load) -> float:
        return 0

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        return nbytes(self.table)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        ends = np.cumsum(run.batch.token_ids == self.separator)
        before = np.concatenate([[0], ends])[:-1]
        first = run.batch.row_offsets[:-1][run.batch.token_rows]
        segments = np.minimum(before - before[first], self.table.shape[0] - 1)
        return run.weights[self.table.name][segments]


@dataclass(frozen=True, slots=True)
class PoolRows(Op):
    """out[l] = the mean of x over the tokens of a row, or x of its first token ("cls"): x [T, n], out [L, n].

    The row is that of logit row l. Sums are in float64, in the order of the tokens.
    """

    x: Value
    method: PoolingMethod

    def flops(self, load: Load) -> float:
        return load.num_tokens * self.x.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        batch, x = run.batch, inputs[0]
        rows = batch.token_rows[batch.logit_rows]
        if self.method == "cls":
            return x[batch.row_offsets[rows]]
        ends = pairwise(batch.row_offsets.tolist())
        sums = [np.add.reduce(x[begin:end], axis=0, dtype=np.float64) for begin, end in ends]
        counts = np.diff(batch.row_offsets).reshape(-1, *[1] * (x.ndim - 1))
        return (np.stack(sums) / counts).astype(np.float32)[rows]
