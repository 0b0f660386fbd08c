"""The arrays of a step besides values: tokens, positions, rows, block tables and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray
from quire.program.batch import Batch
from quire.program.ops import Rotary
from quire.program.program import Count, Program
from quire.program.rope import Rope

_ALIGNMENT = 16  # bytes
_INT = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step on an accelerator: T tokens of R rows, L of which need logits. All arrays are int32.

    `values` are the buffers of values, [rows, width] float32. The entries of `block_tables`, [R, blocks], are
    those of Batch.block_tables. `rotations` are cosine and sine, [T, dim / 2] float32 each, by rope.
    `rounded` is memory for T rows of quantized activations.
    """

    counts: dict[Count, int]
    num_rows: int
    token_ids: DeviceArray  # [T]
    positions: DeviceArray  # [T]
    token_rows: DeviceArray  # [T], the row of each token
    row_offsets: DeviceArray  # [R + 1]
    context_lens: DeviceArray  # [R]
    logit_rows: DeviceArray  # [L]
    block_tables: tuple[DeviceArray, ...]  # by cache group
    rotations: dict[Rope, tuple[DeviceArray, DeviceArray]]
    values: Sequence[DeviceArray]
    rounded: DeviceArray


class StepMemory:
    """The memory of steps on an accelerator: what is uploaded for a step, and its values.

    It grows to the largest step so far. `sizes` are those of a BufferPlan; the last buffer is for quantized
    activations.
    """

    def __init__(
        self, accelerator: Accelerator, sizes: Sequence[tuple[Count, int]], ropes: Sequence[Rope]
    ) -> None:
        self._accelerator = accelerator
        self._sizes = sizes
        self._ropes = ropes
        self._rows: dict[Count, int] = {"T": 0, "L": 0}
        self._buffers: list[DeviceArray] = []
        self._uploaded: DeviceArray | None = None

    def put(self, batch: Batch) -> StepArrays:
        """Copy a batch to the accelerator, in one transfer."""
        counts: dict[Count, int] = {"T": batch.num_tokens, "L": len(batch.logit_rows)}
        integers = (
            batch.token_ids,
            batch.positions,
            batch.token_rows,
            batch.row_offsets,
            batch.context_lens,
            batch.logit_rows,
            *batch.block_tables,
        )
        variants = batch.variants[batch.token_rows]
        rotations = [part for rope in self._ropes for part in rope.cos_sin(batch.positions, variants)]
        placed = self._upload([*(array.astype(_INT) for array in integers), *rotations])
        token_ids, positions, token_rows, row_offsets, context_lens, logit_rows = placed[:6]
        turned = placed[len(integers) :]
        *values, rounded = self._values(counts)
        return StepArrays(
            counts,
            len(batch.context_lens),
            token_ids,
            positions,
            token_rows,
            row_offsets,
            context_lens,
            logit_rows,
            block_tables=tuple(placed[6 : len(integers)]),
            rotations=dict(zip(self._ropes, zip(turned[::2], turned[1::2], strict=True), strict=True)),
            values=values,
            rounded=rounded,
        )

    def _upload(self, arrays: Sequence[np.ndarray]) -> list[DeviceArray]:
        firsts, end = [], 0
        for array in arrays:
            firsts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staged = np.zeros(end, np.uint8)
        for first, array in zip(firsts, arrays, strict=True):
            staged[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
        if self._uploaded is None or self._uploaded.num_bytes < end:
            self._uploaded = self._accelerator.allocate(2 * end)
        memory = self._uploaded
        self._accelerator.write(memory.part(0, (end,)), staged)
        return [
            memory.part(first, array.shape, array.dtype) for first, array in zip(firsts, arrays, strict=True)
        ]

    def _values(self, counts: dict[Count, int]) -> list[DeviceArray]:
        """Return the buffers of values, with as many rows as the step has."""
        if any(rows > self._rows[count] for count, rows in counts.items()):
            self._rows = {count: max(self._rows[count], rows) for count, rows in counts.items()}
            self._buffers = []  # freed before others are allocated
            self._buffers = [
                self._accelerator.allocate(max(1, self._rows[count] * row_bytes))
                for count, row_bytes in self._sizes
            ]
        float32 = np.dtype(np.float32)
        return [
            buffer.part(0, (counts[count], row_bytes // 4), float32)
            for buffer, (count, row_bytes) in zip(self._buffers, self._sizes, strict=True)
        ]


def rotations_of(program: Program) -> tuple[Rope, ...]:
    """Return the rotations that the steps of a program must bring."""
    return tuple(dict.fromkeys(op.rope for op in program if isinstance(op, Rotary)))
