"""Keeping blocks: those that can be found in the caches are copied to a store, some in each step.

So a process that is killed loses little. What is reused before its turn comes is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.block_store import BlockAccess, BlockContent, BlockStore
from quire.engine.caches import Caches


class KeptBlocks:
    """Copies the blocks that became findable since the last call to a store."""

    def __init__(self, caches: Caches, blocks: BlockAccess, store: BlockStore) -> None:
        self._caches = caches
        self._blocks = blocks
        self._store = store
        self._entered = caches.note_entered()

    @property
    def waiting(self) -> bool:
        """True while blocks are to be copied."""
        return bool(self._entered)

    def copy(self, most_bytes: int) -> None:
        """Copy blocks, the oldest first, until that many bytes are exceeded, or the store is busy.

        In their order: a block of a prompt is of no use in a store that lacks those before it.
        """
        num_bytes, num_blocks = 0, sum(pool.num_blocks for _, pool in self._caches.pools)
        while len(self._entered) > num_blocks:  # of so many, the oldest were reused
            del self._entered[next(iter(self._entered))]
        while self._entered and num_bytes < most_bytes and not self._store.busy:
            block_hash = next(iter(self._entered))
            del self._entered[block_hash]
            places = places_of(self._caches, block_hash)
            if places and self._store.wants(block_hash, places.keys()):
                content = read(self._blocks, places)
                self._store.put(block_hash, content)
                num_bytes += sum(map(len, content.values()))


def places_of(caches: Caches, block_hash: bytes) -> dict[int, int]:
    """Return the block that has this prefix, or the snapshot, in each group that has one."""
    found = {group: pool.find(block_hash) for group, pool in caches.pools}
    return {group: block for group, block in found.items() if block is not None}


def read(blocks: BlockAccess, places: Mapping[int, int]) -> BlockContent:
    """Return the content of a block, given its places by group."""
    return {group: blocks.read_blocks(group, [block])[0] for group, block in places.items()}
