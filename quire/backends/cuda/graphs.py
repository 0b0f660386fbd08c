"""Graphs of decode steps: the launches of so many rows of one token each, captured once and replayed.

Their grids and arguments depend on the number of rows alone, as long as the arrays of steps stay where they
are. Rows are added up to the next number that has a graph: tokens of a slot that no request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, Graph
from quire.backends.cuda.launch_list import Record
from quire.backends.cuda.step_arrays import StepArrays
from quire.program.batch import Batch

MOST_ROWS = 256  # of a step with a graph
DEPENDENT = True  # see Accelerator.capture
# Memory of a graph beside the arrays of steps. Estimates: a GPU must show what it is.
GRAPH_BYTES, LAUNCH_BYTES = 64 << 10, 4 << 10


def padded_rows(rows: int) -> int:
    """Return the number of rows that a step of `rows` is computed with: 1, 2, 4, and multiples of 8."""
    return next((count for count in (1, 2, 4) if rows <= count), -(-rows // 8) * 8)


def graph_rows(most: int) -> list[int]:
    """Return the numbers of rows that steps of at most `most` rows have graphs for."""
    return sorted({padded_rows(rows) for rows in range(1, min(most, MOST_ROWS) + 1)})


def decode_batch(batch: Batch, spare_slot: int) -> Batch | None:
    """Return a batch of rows of one token each with rows added; None for any other, or one of many rows.

    Added rows are after the others: token 0 at position 0 of the spare slot.
    """
    rows = len(batch.slots)
    if not rows == batch.num_tokens == len(batch.logit_rows) <= MOST_ROWS:
        return None
    count = padded_rows(rows)

    def more(known: np.ndarray, value: int) -> np.ndarray:
        return np.append(known, np.full((count - rows, *known.shape[1:]), value, known.dtype), axis=0)

    three = batch.rotary_positions
    return replace(
        batch,
        token_ids=more(batch.token_ids, 0),
        positions=more(batch.positions, 0),
        row_offsets=np.arange(count + 1),
        context_lens=more(batch.context_lens, 1),
        slots=more(batch.slots, spare_slot),
        variants=more(batch.variants, 0),
        logit_rows=np.arange(count),
        visible_ends=None,  # of tokens that are alone in their rows and see none after them
        rotary_positions=None if three is None else more(three, 0),
        hidden=None if batch.hidden is None else more(batch.hidden, 0),
    )


_Kind = tuple[int, frozenset[str]]  # of steps: the number of rows, the formats of their adapters


class DecodeGraphs:
    """Launches decode steps: the first with a number of rows one by one, so that its kernels are loaded, the
    next ones by a graph. That begins again when arrays move. Steps with rows that have adapters of different
    formats have launches, and so graphs, of their own.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._launched: set[_Kind] = set()
        self._graphs: dict[_Kind, Graph] = {}
        self._moves = 0

    def launch(self, launches: Sequence[Record], step: StepArrays, moves: int) -> None:
        """Launch a decode step. `moves` counts how often arrays of steps were moved, which ends graphs.

        Kernels may then be others: longer block tables have segments. Those must be launched before they are
        captured, too.
        """
        if moves != self._moves:
            self._moves, self._graphs, self._launched = moves, {}, set()
        kind = step.num_rows, step.adapters.kinds
        if kind not in self._launched:
            self._launched.add(kind)
            for launch in launches:
                self._accelerator.launch(launch(step))
            return
        if kind not in self._graphs:
            self._graphs[kind] = self._accelerator.capture([launch(step) for launch in launches], DEPENDENT)
        self._graphs[kind].replay()
