"""The arrays that encoders and prediction layers read of a step, besides those of every program."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from quire.program import ops
from quire.program.batch import Batch
from quire.program.program import Op, Program

TABLE = "table"  # [R, tokens] of the longest row: the tokens of each row, as places of the step
HIDDEN = "hidden"  # [T, width] float32: Batch.hidden


def ends_of(op: ops.RowAttention) -> Hashable:
    """Return the name of the ends, [T], of what each token sees."""
    return "ends", op.reach


def segments_of(op: ops.EmbedSegments) -> Hashable:
    """Return the name of the segments, [T], of the tokens."""
    return "segments", op.separator, op.table.shape[0]


class TextArrays:
    """Finds the arrays of a program in the batches of its steps, by their names. Rows are whole texts."""

    def __init__(self, program: Program) -> None:
        found: dict[Hashable, Op] = {}
        for op in program:
            if isinstance(op, ops.RowAttention):
                found[TABLE] = found[ends_of(op)] = op
            elif isinstance(op, ops.EmbedSegments):
                found[segments_of(op)] = op
            elif isinstance(op, ops.PreviousHidden):
                found[HIDDEN] = op
        self._ops = found

    def of(self, batch: Batch) -> dict[Hashable, np.ndarray]:
        """Return the arrays of a batch, int32 but for hidden states."""
        counts = np.diff(batch.row_offsets)
        within = np.arange(batch.num_tokens) - batch.row_offsets[:-1][batch.token_rows]
        found = dict[Hashable, np.ndarray]()
        for name, op in self._ops.items():
            if name == HIDDEN:
                if batch.hidden is None:
                    raise ValueError("this batch brings no hidden states")
                found[HIDDEN] = np.ascontiguousarray(batch.hidden, np.float32)
                continue
            if name == TABLE:
                places = np.arange(max(counts, default=0))
                values = np.minimum(batch.row_offsets[:-1, None] + places, batch.num_tokens - 1)
            elif isinstance(op, ops.RowAttention):
                values = counts[batch.token_rows]
                if op.reach is not None:
                    values = np.minimum(values, within + op.reach + 1)
            elif isinstance(op, ops.EmbedSegments):
                ends = np.concatenate([[0], np.cumsum(batch.token_ids == op.separator)])[:-1]
                first = batch.row_offsets[:-1][batch.token_rows]
                values = np.minimum(ends - ends[first], op.table.shape[0] - 1)
            found[name] = values.astype(np.int32)
        return found
