"""The memory of cache blocks as bytes: the contents of blocks, copied out of the caches and into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.program.caches import CacheSpec

Content = bytes | memoryview


class BlockMemory:
    """Copies contents of blocks (of a group of states: of snapshots), by cache group.

    `arrays` are, for each group, those that hold its blocks, [blocks, ...] each: the content of a block is
    what they have at its index, one after the other. Copies are made in the calling thread.
    """

    def __init__(self, arrays: Iterable[Iterable[np.ndarray]]) -> None:
        self._arrays = [[_bytes(array) for array in group if array.size] for group in arrays]
        self.num_bytes = [sum(array.shape[1] for array in group) for group in self._arrays]  # of a block

    def read(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Return the contents of these blocks."""
        arrays = self._arrays[group]
        return [b"".join([array[block].data for array in arrays]) for block in block_ids]

    def write(self, group: int, block_ids: Sequence[int], contents: Sequence[Content]) -> None:
        """Replace the contents of these blocks. Raises ValueError for one of another size."""
        arrays, num_bytes = self._arrays[group], self.num_bytes[group]
        for block, content in zip(block_ids, contents, strict=True):
            if len(content) != num_bytes:
                raise ValueError(f"a block of group {group} has {num_bytes} bytes, not {len(content)}")
            first = 0
            for array in arrays:
                array[block] = np.frombuffer(content, np.uint8, array.shape[1], first)
                first += array.shape[1]


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return a view [blocks, bytes] of an array [blocks, ...]."""
    return array.reshape(len(array), -1).view(np.uint8)


def layout_of(
    name: str, kv_dtype: str, block_size: int, groups: Sequence[CacheSpec], layers: Sequence[int]
) -> str:
    """Return what contents of blocks depend on, as text: only equal texts mean contents of one form.

    `layers` has the cache group of each layer.
    """
    each = "; ".join(f"{layers.count(group)} x {spec}" for group, spec in enumerate(groups))
    return f"{name}, {kv_dtype}, blocks of {block_size}: {each}"
