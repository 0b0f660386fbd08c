"""The arrays that encoders and prediction layers read of a step, besides those of every program."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from quire.program import ops
from quire.program.batch import Batch
from quire.program.program import Op, Program

WINDOWS = ("window positions", "window rows", "window lengths")  # as of a batch whose rows are the windows
HIDDEN = "hidden"  # [T, width] float32: Batch.hidden


def table_of(op: ops.RowAttention) -> Hashable:
    """Return the name of the places in the step of the tokens of each row or window, [R, most tokens]."""
    return "table", op.window is not None


def ends_of(op: ops.RowAttention) -> Hashable:
    """Return the name of the ends, [T], of what each token sees."""
    return "ends", op.reach, op.window is not None


def segments_of(op: ops.EmbedSegments) -> Hashable:
    """Return the name of the segments, [T], of the tokens."""
    return "segments", op.separator, op.table.shape[0]


class TextArrays:
    """Finds the arrays of a program in the batches of its steps, by their names. Rows are whole texts."""

    def __init__(self, program: Program) -> None:
        found: dict[Hashable, Op] = {}
        for op in program:
            if isinstance(op, ops.RowAttention):
                found[table_of(op)] = found[ends_of(op)] = op
            elif isinstance(op, ops.EmbedSegments):
                found[segments_of(op)] = op
            elif isinstance(op, ops.PreviousHidden):
                found[HIDDEN] = op
        self._ops = found

    def of(self, batch: Batch) -> dict[Hashable, np.ndarray]:
        """Return the arrays of a batch, int32 but for hidden states."""
        found = dict[Hashable, np.ndarray]()
        for name, op in self._ops.items():
            if name == HIDDEN:
                if batch.hidden is None:
                    raise ValueError("this batch brings no hidden states")
                found[HIDDEN] = np.ascontiguousarray(batch.hidden, np.float32)
            elif isinstance(op, ops.RowAttention):
                own = batch if op.window is None else batch.by_window
                if op.window is not None:
                    arrays = (own.positions, own.token_rows, own.context_lens)
                    found |= {of: values.astype(np.int32) for of, values in zip(WINDOWS, arrays, strict=True)}
                found[name] = (_table(own) if name == table_of(op) else _ends(own, op.reach)).astype(np.int32)
            elif isinstance(op, ops.EmbedSegments):
                ends = np.concatenate([[0], np.cumsum(batch.token_ids == op.separator)])[:-1]
                first = batch.row_offsets[:-1][batch.token_rows]
                found[name] = np.minimum(ends - ends[first], op.table.shape[0] - 1).astype(np.int32)
        return found


def _table(batch: Batch) -> np.ndarray:
    places = np.arange(max(np.diff(batch.row_offsets), default=0))
    return np.minimum(batch.row_offsets[:-1, None] + places, batch.num_tokens - 1)


def _ends(batch: Batch, reach: int | None) -> np.ndarray:
    ends = np.diff(batch.row_offsets)[batch.token_rows]
    if reach is None:
        return ends
    within = np.arange(batch.num_tokens) - batch.row_offsets[:-1][batch.token_rows]
    return np.minimum(ends, within + reach + 1)
