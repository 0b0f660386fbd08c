"""Embedding of token ids and positions, and selection of the rows that need logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightBytes, WeightSpec


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = table[token_ids[t]], table [vocab, hidden]. Reads only the rows of the step's tokens."""

    table: WeightSpec

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.table,)

    def flops(self, load: Load) -> float:
        return 0

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        return nbytes(self.table) * load.num_tokens / self.table.shape[0]

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return _rows(run, self.table, run.batch.token_ids)


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
class SampledRows(Op):
    """out[l] = x[logit_rows[l]]: later ops compute only rows that need logits."""

    x: Value

    def flops(self, load: Load) -> float:
        return 0

    def activation_bytes(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.out.row_bytes

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return inputs[0][run.batch.logit_rows]
