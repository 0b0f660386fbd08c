"""Attention of few tokens with long contexts as launches: programs compute segments, others merge them.

The bits are those of `attend`, whose sums have the same partitions and segments. Which launches a step has
depends on its numbers of tokens and on the lengths of its block tables alone, not on what is in these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray, Launch, Memory
from quire.backends.cuda.image_arrays import visible_ends
from quire.backends.cuda.kernels.variants import LISTED_TOKENS
from quire.backends.cuda.scratch import carve
from quire.backends.cuda.step_arrays import StepArrays

NOTHING = Launch("attend", (0, 0, 0), ())  # a launch that a step does not have
LEAST = 5  # segments of a token from which on they are computed apart
SEGMENT = 512  # positions
_PROGRAMS = 128  # of `attend` that leave no part of a GPU idle; four times as many compute segments
_SUM_BYTES, _MOST_ITEMS = 32 << 20, 1 << 15
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
_PARTS = ((LISTED_TOKENS + 4, _INT32), (2 * _MOST_ITEMS, _INT32), (_SUM_BYTES // 4, _FLOAT32))
MEMORY_BYTES = sum(width * dtype.itemsize for width, dtype in _PARTS)
_Args = Callable[[StepArrays], tuple[Argument, ...]]


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """Sizes that the segments of an attention depend on, besides positions; without a window it is 0.

    A program has the heads of one of `groups`.
    """

    table: int  # its cache group
    window: int
    chunked: bool
    heads: int
    groups: int
    value_dim: int

    @property
    def sum_width(self) -> int:
        """The numbers that are kept of a segment: sums by head, and a maximum and a total of each."""
        return self.heads * (self.value_dim + 2)


class Segments:
    """The memory of segments, which all layers share, and for which of them it was listed last."""

    def __init__(self, memory: Memory, block_size: int) -> None:
        self._memory = memory
        self._block_size = block_size
        self._held: DeviceArray | None = None
        self._listed: SegmentShape | None = None

    def most(self, shape: SegmentShape, step: StepArrays) -> int:
        """Return how many segments a token of a step may see; 0 if they are not computed apart.

        They are in steps whose tokens all need logits, as where drafts are verified, and see none after
        them, if programs of `attend` alone would be too few.
        """
        tokens = step.counts["T"]
        most = -(-step.block_tables[shape.table].shape[1] * self._block_size // SEGMENT)
        if shape.window:
            most = min(most, shape.window // SEGMENT + 2)
        few = tokens == step.counts["L"] <= LISTED_TOKENS and tokens * shape.groups <= _PROGRAMS
        few = few and (step.num_rows == tokens or visible_ends("T") not in step.texts)
        fits = tokens * most <= min(_MOST_ITEMS, _SUM_BYTES // (4 * shape.sum_width))
        return most if few and fits and most >= LEAST else 0

    def launches(
        self,
        shape: SegmentShape,
        kernel: str,
        constants: dict[str, Constant],
        padded: int,
        attended: _Args,
        merged: _Args,
    ) -> list[Callable[[StepArrays], Launch]]:
        """Return the launches of an attention: its list, unless it is there already, segments, their sums.

        `attended` are the arguments from q on of `kernel`, which computes segments of values with `padded`
        numbers; `merged` are the result, sinks, and whether there are any.
        """
        if self._held is None:
            self._held = self._memory.allocate(MEMORY_BYTES)
        memory = self._held

        def listed(step: StepArrays) -> Launch:
            firsts, items, _, _ = _arrays(memory, shape)
            args = (items, firsts, step.positions, step.counts["T"], shape.window, int(shape.chunked))
            return Launch("list_segments", (1, 1, 1), args, {"BLOCK": LISTED_TOKENS})

        def computed(step: StepArrays) -> Launch:
            firsts, items, partial, stats = _arrays(memory, shape)
            programs = min(step.counts["T"] * self.most(shape, step), -(-4 * _PROGRAMS // shape.groups))
            args = (partial, stats, items, firsts, *attended(step))
            return Launch(kernel, (programs, shape.groups, 1), args, constants)

        def summed(step: StepArrays) -> Launch:
            firsts, _, partial, stats = _arrays(memory, shape)
            out, sinks, has_sinks = merged(step)
            args = (out, partial, stats, firsts, sinks, shape.heads, shape.value_dim, has_sinks)
            grid = (step.counts["T"], shape.heads, 1)
            return Launch("merge_segments", grid, args, {"VALUE_DIM": padded})

        found = [computed, summed] if self._listed == shape else [listed, computed, summed]
        self._listed = shape
        return [self._if_apart(shape, launch) for launch in found]

    def _if_apart(
        self, shape: SegmentShape, launch: Callable[[StepArrays], Launch]
    ) -> Callable[[StepArrays], Launch]:
        return lambda step: launch(step) if self.most(shape, step) else NOTHING


def _arrays(memory: DeviceArray, shape: SegmentShape) -> tuple[DeviceArray, ...]:
    """Return firsts, items, partial and stats, as kernels.segments has them."""
    firsts, items, sums = carve(memory, 1, _PARTS)
    number = sums.shape[1] // shape.sum_width
    partial = sums.part(0, (number, shape.heads, shape.value_dim))
    first = -(-partial.num_bytes // 16) * 16
    number = (sums.num_bytes - first) // (8 * shape.heads)
    return firsts, items, partial, sums.part(first, (number, shape.heads, 2))
