"""Memory of an accelerator that is used anew in every step, and grows to the largest one so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import ALIGNMENT, DeviceArray, Memory


class ReusedMemory:
    """An array of bytes that is as large as the most that was asked for.

    Launches and copies are in order, so the next step may be given it while the last one still computes.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: DeviceArray | None = None
        self.moves = 0  # how often it was allocated

    def take(self, num_bytes: int, spare: int = 0) -> DeviceArray:
        """Return so many bytes, with any content; if they must be allocated, with `spare` more."""
        if self._held is None or self._held.num_bytes < num_bytes:
            self._held = None  # freed before more is allocated
            self._held = self._memory.allocate(max(1, num_bytes + spare))
            self.moves += 1
        return self._held.part(0, (num_bytes,))

    def arrays(self, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[DeviceArray]:
        """Return arrays of these shapes and types, one after the other."""
        parts = [DeviceArray(None, kind, shape) for shape, kind in shapes]
        firsts, end = _places([part.num_bytes for part in parts])
        memory = self.take(end)
        return [memory.part(first, part.shape, part.dtype) for first, part in zip(firsts, parts, strict=True)]

    def upload(self, arrays: Sequence[np.ndarray]) -> list[DeviceArray]:
        """Copy arrays to the accelerator, in one transfer."""
        firsts, end = _places([array.nbytes for array in arrays])
        staged = np.zeros(end, np.uint8)
        for first, array in zip(firsts, arrays, strict=True):
            staged[first : first + array.nbytes] = array.reshape(-1).view(np.uint8)
        memory = self.take(end, spare=end)
        self._memory.write(memory, staged)
        return [
            memory.part(first, array.shape, array.dtype) for first, array in zip(firsts, arrays, strict=True)
        ]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where parts of these bytes begin, and where the last one ends."""
    firsts, end = [], 0
    for size in sizes:
        firsts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return firsts, end
