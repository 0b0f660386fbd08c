"""A pool of cache blocks: reference counts, and the prefix cache of computed blocks.

A block has a reference count, and a hash once it is full and computed. The hash of a block covers its
tokens and, through its parent's hash, every token before it: equal hashes mean equal prefixes. A released
block can be found by its hash until it is reused. The free list is also the order of eviction (the idea of
vLLM's block pool).
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(salt: str) -> bytes:
    """Return the parent hash of all first blocks under `salt`: chains with different salts never match."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int], keys: bytes = b"") -> bytes:
    """Return SHA-256 of the parent's hash, the block's tokens (32 bits, little endian) and its keys."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids) + keys).digest()


class BlockPool:
    """Reference-counted blocks 0 ... num_blocks - 1; every operation is O(1) per block.

    With `retain` a released block can be found until it is reused; without, only while it is held.
    """

    def __init__(self, num_blocks: int, retain: bool = True) -> None:
        self.num_blocks = num_blocks
        self._retain = retain
        self._num_holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.num_revived = 0  # released blocks that were found and reused as prefixes, since the start
        self.num_registered = 0  # blocks that became findable, since the start
        self._free = OrderedDict.fromkeys(range(num_blocks))  # the first is the next to be reused

    @property
    def num_free(self) -> int:
        """Blocks that are not held, cached ones included."""
        return len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds this prefix, or None."""
        return self._block_of.get(block_hash)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that are not held: sharing them shortens the free list."""
        return sum(not self._num_holders[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._free[block]
                self.num_revived += 1
            self._num_holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, least recently used first; their cached content is forgotten."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks requested, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of `blocks`, given in the order of their positions.

        The tail is freed first and hence evicted first, so a prefix outlives its continuations. A block that
        cannot be found again is reused before all others.
        """
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            self._free[block] = None
            if not self._retain:
                self._forget(block)
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Add a held, full and computed block to the prefix cache. Of equal blocks the first is kept."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.num_registered += 1

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool is consistent and `tables` hold exactly the held blocks."""
        held = Counter(block for table in tables for block in table)
        for block, holders in enumerate(self._num_holders):
            assert holders == held[block], f"block {block}: {holders} holders counted, {held[block]} found"
            assert (block in self._free) == (holders == 0), f"block {block}: held and free, or neither"
            assert self._retain or holders or self._hash_of[block] is None, f"block {block} is findable"
        assert len(self._free) <= self.num_blocks
        findable = {h: block for block, h in enumerate(self._hash_of) if h is not None}
        assert findable == self._block_of, "hashes and blocks disagree"
