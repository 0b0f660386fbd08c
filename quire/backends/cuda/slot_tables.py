"""Lengths and block tables of slots, which stay in the memory of an accelerator; steps bring what changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Launch
from quire.backends.cuda.kernels.variants import LIST_BLOCK

_LEAST_BLOCKS = 32  # of a table; a power of two, as all later sizes are
_INT = np.dtype(np.int32)


class SlotTables:
    """The contexts' lengths, [slots], and a block table of each cache group, [slots, blocks], all int32.

    They lie one after the other in one array, so that one launch places all changes of a step. A copy in the
    memory of the host is uploaded whole when tables become longer. `lengths` are padded to whole 16 bytes.
    """

    def __init__(self, accelerator: Accelerator, num_slots: int, num_groups: int) -> None:
        self._accelerator = accelerator
        self._num_slots = num_slots
        self._num_lengths = -(-num_slots // 4) * 4
        self._num_groups = num_groups
        self._stride = _LEAST_BLOCKS
        self._known = np.zeros(self._size(), _INT)
        self._memory: DeviceArray | None = None  # None: to be uploaded whole
        self.moves = 0  # how often it was allocated
        self._changed: list[np.ndarray] = []  # places in both

    def _size(self) -> int:
        return self._num_lengths + self._num_groups * self._num_slots * self._stride

    def grant(self, group: int, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Write block ids into a table from entry `first` on."""
        end = first + len(block_ids)
        if end > self._stride:
            self._lengthen(end)
        begin = self._num_lengths + (group * self._num_slots + slot) * self._stride
        self._set(np.arange(begin + first, begin + end), np.array(block_ids, _INT))

    def set_lengths(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Set the lengths of the contexts of different slots."""
        self._set(slots, lengths)

    def _set(self, places: np.ndarray, values: np.ndarray) -> None:
        self._known[places] = values
        self._changed.append(places)

    def _lengthen(self, num_blocks: int) -> None:
        before, stride = self._known, self._stride
        while self._stride < num_blocks:
            self._stride *= 2
        self._known = np.zeros(self._size(), _INT)
        self._known[: self._num_lengths] = before[: self._num_lengths]
        shape = (self._num_groups, self._num_slots, -1)
        tables = self._known[self._num_lengths :].reshape(shape)
        tables[..., :stride] = before[self._num_lengths :].reshape(shape)
        self._memory, self._changed = None, []

    def known(self, group: int) -> np.ndarray:
        """Return the tables of a cache group, [slots, blocks], as they are in the memory of the host."""
        tables = self._known[self._num_lengths :].reshape(self._num_groups, self._num_slots, -1)
        return tables[group]

    def forget(self) -> None:
        """Note that changes were lost on their way: all tables are to be uploaded."""
        self._memory, self._changed = None, []

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places that changed since the last call, each once, and what is there now."""
        places = np.unique(np.concatenate([np.zeros(0, np.int64), *self._changed]))
        self._changed = []
        return places, self._known[places]

    def place(self, places: DeviceArray, values: DeviceArray) -> tuple[DeviceArray, list[DeviceArray]]:
        """Make the changes on the accelerator; return the lengths and the tables there."""
        if self._memory is None:
            memory = self._accelerator.allocate(self._known.nbytes)
            self.moves += 1
            self._memory = memory.part(0, self._known.shape, _INT)
            self._accelerator.write(self._memory, self._known)
        elif count := places.shape[0]:
            grid = (-(-count // LIST_BLOCK), 1, 1)
            args = (self._memory, places, values, count)
            self._accelerator.launch(Launch("place_entries", grid, args, {"BLOCK": LIST_BLOCK}))
        first, shape = self._num_lengths * _INT.itemsize, (self._num_slots, self._stride)
        each = self._num_slots * self._stride * _INT.itemsize
        tables = [self._memory.part(first + group * each, shape) for group in range(self._num_groups)]
        return self._memory.part(0, (self._num_slots,)), tables
