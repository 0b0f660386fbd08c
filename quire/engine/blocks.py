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
from itertools import islice


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
        self.changed: dict[bytes, None] | None = None  # hashes registered or forgotten, while it is followed
        self.entered: dict[bytes, None] | None = None  # hashes registered, while blocks are kept in a store
        # Free blocks in the order of reuse: those released without a hash, the last first; those never used;
        # and those that can be found, the first first.
        self._blank: list[int] = []
        self._next = 0  # the first that was never used
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that are not held, cached ones included."""
        return len(self._blank) + self.num_blocks - self._next + len(self._idle)

    @property
    def num_findable(self) -> int:
        """Blocks that can be found by their hash, held or not."""
        return len(self._block_of)

    def states(self, blocks: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (block, references, 1 if it can be found by its hash or 0) of each."""
        holders, hashes = self._num_holders, self._hash_of
        return [(block, holders[block], int(hashes[block] is not None)) for block in blocks]

    def idle_findable(self, count: int) -> list[int]:
        """Return at most `count` findable blocks that are not held, the last to be reused first."""
        return list(islice(reversed(self._idle), count))

    def findable(self) -> Iterable[bytes]:
        """Return the hashes of all blocks that can be found."""
        return self._block_of.keys()

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
                del self._idle[block]
                self.num_revived += 1
            self._num_holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, least recently used first; their cached content is forgotten."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks requested, {self.num_free} free")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            elif self._next < self.num_blocks:
                block, self._next = self._next, self._next + 1
            else:
                block, _none = self._idle.popitem(last=False)
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
            if not self._retain:
                self._forget(block)
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Add a held, full and computed block to the prefix cache. Of equal blocks the first is kept."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.num_registered += 1
            if self.entered is not None:
                self.entered[block_hash] = None
            if self.changed is not None:
                self.changed[block_hash] = None

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            if self.changed is not None:
                self.changed[block_hash] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool is consistent and `tables` hold exactly the held blocks."""
        held = Counter(block for table in tables for block in table)
        free = {*self._blank, *range(self._next, self.num_blocks), *self._idle}
        for block, holders in enumerate(self._num_holders):
            assert holders == held[block], f"block {block}: {holders} holders counted, {held[block]} found"
            assert (block in free) == (holders == 0), f"block {block}: held and free, or neither"
            assert self._retain or holders or self._hash_of[block] is None, f"block {block} is findable"
            found_idle = self._hash_of[block] is not None and not holders
            assert not found_idle or block in self._idle, f"block {block} is reused too early"
        assert len(free) == self.num_free, "a block is free twice"
        findable = {h: block for block, h in enumerate(self._hash_of) if h is not None}
        assert findable == self._block_of, "hashes and blocks disagree"
