"""The arrays of a step besides values: tokens, positions, rows, block tables and rotations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, Memory
from quire.backends.cuda.adapters import DeviceAdapters, StepAdapters
from quire.backends.cuda.fused import RotatedAttention
from quire.backends.cuda.image_arrays import ImageArrays
from quire.backends.cuda.memory import ReusedMemory
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.cuda.states import StateArrays, state_integers
from quire.backends.cuda.text_arrays import TextArrays
from quire.program.batch import Batch
from quire.program.ops import Rotary
from quire.program.program import Count, Program
from quire.program.rope import Rope

_INT = np.dtype(np.int32)
Turn = tuple[Rope, Count]  # a rotation, of all tokens or of those that need logits
Tiles = tuple[Count, int, bool]  # tiles of so many of these at most, of rows or, if true, of windows


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step on an accelerator: T tokens of R rows, L of which need logits. All arrays are int32.

    `values` are the buffers of values, [rows, width] float32. `token_rows` are the rows of `context_lens` and
    of `block_tables`, [S, blocks], whose entries are those of Batch.block_tables: the S slots of an engine,
    or the R rows of a batch. `rotations` are cosine and sine, [T or L, dim / 2] float32 each, by rope and
    count. `scratch` is memory of one op at a time, with T rows. `exchanged` is memory for what the ranks of a
    group exchange, with T or L rows.
    """

    counts: dict[Count, int]
    num_rows: int
    token_ids: DeviceArray  # [T]
    positions: DeviceArray  # [T]
    token_rows: DeviceArray  # [T]
    places: dict[Count, tuple[DeviceArray, DeviceArray]]  # positions and rows, of tokens or of logit_rows
    row_offsets: DeviceArray  # [R + 1]
    context_lens: DeviceArray  # [S]
    logit_rows: DeviceArray  # [L]
    block_tables: tuple[DeviceArray, ...]  # by cache group
    rotations: dict[Turn, tuple[DeviceArray, DeviceArray]]
    values: Sequence[DeviceArray]
    exchanged: Mapping[Count, DeviceArray]
    scratch: DeviceArray
    adapters: StepAdapters
    texts: Mapping[Hashable, DeviceArray]  # of some programs, by the names of text_arrays
    states: StateArrays | None  # if the program has any
    tiles: Mapping[Tiles, DeviceArray]  # as row_tiles has them


class StepMemory:
    """The memory of steps on an accelerator: what is uploaded for a step, and its values.

    It grows to the largest step so far. Arrays of two steps with the same counts are at the same places, as
    long as nothing moves. `sizes` are those of a BufferPlan; the last three buffers are for exchanges of T
    and of L rows, and scratch memory. `states` are the cache groups of states.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: Sequence[tuple[Count, int]],
        ropes: Sequence[Turn],
        adapters: DeviceAdapters,
        texts: TextArrays,
        images: ImageArrays,
        states: Sequence[int],
        tiles: Sequence[Tiles],
    ) -> None:
        self._memory = memory
        self._adapters = adapters
        self._texts, self._images = texts, images
        self._sizes = sizes
        self._ropes = ropes
        self._states, self._tiles = states, tiles
        self._rows: dict[Count, int] = {"T": 0, "L": 0}
        self._buffers: list[DeviceArray] = []
        self._moves = 0
        self._uploads = ReusedMemory(memory)

    @property
    def moves(self) -> int:
        """Return how often arrays of steps were moved, which changes all addresses of earlier steps."""
        return self._moves + self._uploads.moves + self._adapters.moves

    def put(self, batch: Batch, tables: SlotTables | None = None) -> StepArrays:
        """Copy a batch to the accelerator, in one transfer; with `tables`, what changed of these."""
        counts: dict[Count, int] = {"T": batch.num_tokens, "L": len(batch.logit_rows)}
        rows = batch.token_rows
        variants = batch.variants[rows]
        tokens: dict[Count, Any] = {"T": slice(None), "L": batch.logit_rows}
        rotations = [
            part
            for rope, of in self._ropes
            for part in rope.cos_sin(_rotary_positions(batch, rope)[tokens[of]], variants[tokens[of]])
        ]
        tiles = [
            row_tiles((batch.by_window.token_rows if windows else rows)[tokens[of]], most)
            for of, most, windows in self._tiles
        ]
        if tables is None:
            own: tuple[np.ndarray, ...] = (batch.context_lens, *batch.block_tables)
        else:
            own, rows = tables.changes(), batch.slots[rows]
        kinds, adapted = self._adapters.numbers(batch)
        texts = self._texts.of(batch) | self._images.of(batch)
        tokens_and_rows = (batch.token_ids, batch.positions, rows, batch.row_offsets, batch.logit_rows)
        sampled = (batch.positions[batch.logit_rows], rows[batch.logit_rows])
        states = state_integers(batch, self._states) if self._states else []
        # Sizes depend on the counts, those of tiles also on rows of more than one token, which have no graph.
        integers = (tokens_and_rows, sampled, tuple(adapted.values()), states, tiles)
        groups = [[array.astype(_INT) for array in group] for group in integers]
        groups += [rotations, list(texts.values()), [array.astype(_INT) for array in own]]
        placed = iter(self._uploads.upload([array for group in groups for array in group]))
        first_five, logits, adapters, kept, tiled, turned, of_texts, others = (
            list(islice(placed, len(group))) for group in groups
        )
        token_ids, positions, token_rows, row_offsets, logit_rows = first_five
        first, *others = others
        if tables is not None:
            first, others = tables.place(first, *others)
        *values, of_tokens, of_logits, scratch = self._values(counts)
        return StepArrays(
            counts,
            len(batch.context_lens),
            token_ids,
            positions,
            token_rows,
            {"T": (positions, token_rows), "L": (logits[0], logits[1])},
            row_offsets,
            context_lens=first,
            logit_rows=logit_rows,
            block_tables=tuple(others),
            rotations=dict(zip(self._ropes, zip(turned[::2], turned[1::2], strict=True), strict=True)),
            values=values,
            exchanged={"T": of_tokens, "L": of_logits},
            scratch=scratch,
            adapters=StepAdapters(kinds, dict(zip(adapted, adapters, strict=True))),
            texts=dict(zip(texts, of_texts, strict=True)),
            states=StateArrays.of(kept, self._states) if self._states else None,
            tiles=dict(zip(self._tiles, tiled, strict=True)),
        )

    def _values(self, counts: dict[Count, int]) -> list[DeviceArray]:
        """Return the buffers of values, with as many rows as the step has."""
        if any(rows > self._rows[count] for count, rows in counts.items()):
            most = {count: max(self._rows[count], rows) for count, rows in counts.items()}
            self._rows, self._buffers = {"T": 0, "L": 0}, []  # freed before others are allocated
            self._moves += 1
            self._buffers = [
                self._memory.allocate(max(1, most[count] * row_bytes)) for count, row_bytes in self._sizes
            ]
            self._rows = most
        float32 = np.dtype(np.float32)
        return [
            buffer.part(0, (counts[count], row_bytes // 4), float32)
            for buffer, (count, row_bytes) in zip(self._buffers, self._sizes, strict=True)
        ]


def row_tiles(rows: np.ndarray, most: int) -> np.ndarray:
    """Return where tiles of tokens begin, and the end of the last: at most `most` each, all of one row.

    `rows` [T] are those of the tokens, whose tokens are next to each other. So a token that is alone in its
    row has a program for itself, also beside prompts.
    """
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    within = np.arange(len(rows)) - np.repeat(begins, np.diff([*begins, len(rows)]))
    return np.append(np.flatnonzero(within % most == 0), len(rows))


def _rotary_positions(batch: Batch, rope: Rope) -> np.ndarray:
    """Return the positions, [T] or [T, 3], by which a rope rotates the tokens of a batch."""
    three = batch.rotary_positions if rope.sections else None
    return batch.positions if three is None else three


def rotations_of(program: Program) -> tuple[Turn, ...]:
    """Return the rotations that the steps of a program must bring."""
    turned = (op for op in program if isinstance(op, Rotary | RotatedAttention))
    found = ((op.rope, op.x.count if isinstance(op, Rotary) else op.q.count) for op in turned)
    return tuple(dict.fromkeys(found))
