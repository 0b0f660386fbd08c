"""The arrays that ops of images read of a step, besides those of every program."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from quire.program import ops
from quire.program.batch import Batch
from quire.program.program import Count, Program

PATCHES = "patches"  # [T, columns] float32
ADDRESSES = "addresses"  # [ranks, T or more] int64, of the embeddings of tokens of images; 0 for others


def visible_ends(count: Count) -> Hashable:
    """Return the name of the ends, [T] or [L] int32, of what tokens see: only in steps of whole images."""
    return "ends of images", count


class ImageArrays:
    """Finds the arrays of a program in the batches of its steps, by their names, for so many ranks."""

    def __init__(self, program: Program, ranks: int) -> None:
        self._ranks = ranks
        self._sees = any(isinstance(op, ops.PlaceImages) for op in program)
        self._columns = next((op.out.width for op in program if isinstance(op, ops.Patches)), 0)

    def of(self, batch: Batch) -> dict[Hashable, np.ndarray]:
        """Return the arrays of a batch. Patches that it does not bring are zeros."""
        found = dict[Hashable, np.ndarray]()
        if self._columns:
            none = np.zeros((batch.num_tokens, self._columns), np.float32)
            found[PATCHES] = none if batch.patches is None else batch.patches.astype(np.float32)
        if self._sees:
            places = -(-batch.num_tokens // 2) * 2  # rows begin at multiples of 16 bytes
            found[ADDRESSES] = np.zeros((self._ranks, places), np.int64)
            if batch.image_tokens is not None and batch.image_addresses is not None:
                found[ADDRESSES][:, batch.image_tokens] = batch.image_addresses
        if (ends := batch.visible_ends) is not None:
            found[visible_ends("T")] = ends.astype(np.int32)
            found[visible_ends("L")] = ends[batch.logit_rows].astype(np.int32)
        return found
