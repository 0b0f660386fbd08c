"""The block map: which replicas have which blocks, by prefixes of the blocks' hashes, in bounded memory.

Replicas are held in *shards* of 64. A shard is a hash table in NumPy arrays with a row for each block: the
prefix of its hash, one bit for each replica that has it, and when it was used last. All operations take whole
reports or chains at once, so that none of them loops over blocks in Python.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.engine.status import HASH_PREFIX_BYTES

SHARD = 64  # replicas, the bits of an entry's mask
CHUNK = 1 << 12  # blocks added at once
_FIRST_MATCHED = 32  # blocks of a chain that are looked up first; four times as many follow
_BUCKET = 8  # rows: a line of the processor's cache
_LEAST_ROWS = 1 << 13
_ROWS_PER_BLOCK = 1.75  # after a table was rebuilt; it is rebuilt when more than _FULL of its rows are taken
_FULL = 0.7
_LATEST = (1 << 32) - 1  # time of use that a table can keep
_EVICTED = 16  # the part (one in so many) of all blocks that makes place when the map is full

Keys = np.ndarray  # [num_blocks] uint64


def keys_of(hashes: Iterable[bytes]) -> Keys:
    """Return the keys of blocks with these hashes."""
    return keys_in(b"".join([block_hash[:HASH_PREFIX_BYTES] for block_hash in hashes]))


def keys_in(prefixes: bytes) -> Keys:
    """Return the keys of joined prefixes of hashes. 0 marks an empty row, so it is not a key."""
    return np.maximum(np.frombuffer(prefixes, "<u8"), 1)


class BlockMap:
    """Pairs of a block and a replica that has it: at most `max_pairs`, those used least recently make place.

    Takes 35 bytes a pair where each block has one replica, and at most 64 while a table is rebuilt.
    """

    def __init__(self, max_pairs: int = 1_000_000) -> None:
        self._max_pairs = max_pairs
        self._shards: dict[int, _Shard] = {}
        self._now = 0  # a count of calls, halved with all times of use before it exceeds _LATEST

    def __len__(self) -> int:
        return sum(shard.num_pairs for shard in self._shards.values())

    @property
    def nbytes(self) -> int:
        """The size of all tables."""
        return sum(shard.nbytes for shard in self._shards.values())

    def count(self, replica: int) -> int:
        """Return how many blocks a replica has, as far as they are in the map."""
        shard = self._shards.get(replica // SHARD)
        return 0 if shard is None else shard.counts[replica % SHARD]

    def add(self, replica: int, keys: Keys) -> None:
        """Note that a replica has these blocks."""
        shard = self._shards.get(replica // SHARD)
        if shard is None:
            shard = self._shards[replica // SHARD] = _Shard()
        chunk = max(1, min(CHUNK, self._max_pairs // _EVICTED))
        for first in range(0, min(len(keys), self._max_pairs), chunk):
            part = np.unique(keys[first : first + chunk])
            self._tick()
            self._make_room(len(part))
            shard.add(replica % SHARD, part, self._now)

    def remove(self, replica: int, keys: Keys) -> None:
        """Note that a replica has these blocks no longer."""
        if (shard := self._shards.get(replica // SHARD)) is not None and len(keys):
            shard.remove(replica % SHARD, np.unique(keys))

    def remove_replica(self, replica: int) -> None:
        """Forget all blocks of a replica."""
        if (shard := self._shards.get(replica // SHARD)) is not None:
            shard.remove_replica(replica % SHARD)
            if not shard.num_pairs:
                del self._shards[replica // SHARD]

    def match(self, keys: Keys) -> dict[int, int]:
        """Return how many leading blocks of a chain replicas have, if any; these count as used now."""
        found: dict[int, int] = {}
        if len(keys):
            self._tick()
            for number, shard in self._shards.items():
                for bit, num_blocks in shard.match(keys, self._now):
                    found[number * SHARD + bit] = num_blocks
        return found

    def _tick(self) -> None:
        if self._now >= _LATEST:
            self._now //= 2
            for shard in self._shards.values():
                shard.used //= 2
        self._now += 1

    def _make_room(self, count: int) -> None:
        """Evict the blocks used least recently, of all shards, until there is room for `count` pairs."""
        while (excess := len(self) + count - self._max_pairs) > 0:
            used = np.concatenate([shard.used[shard.taken()] for shard in self._shards.values()])
            number = min(len(used), max(excess, len(used) // _EVICTED))
            latest = np.partition(used, number - 1)[number - 1]
            spare = np.count_nonzero(used <= latest) - number  # more than enough were used as late as that
            for shard in self._shards.values():
                rows = np.flatnonzero(shard.taken() & (shard.used <= latest))
                if spare > 0:
                    tied = np.flatnonzero(shard.used[rows] == latest)[:spare]
                    rows, spare = np.delete(rows, tied), spare - len(tied)
                shard.evict(rows)


class _Shard:
    """The blocks of at most 64 replicas, by open addressing. A row without replicas stays until a rebuild."""

    def __init__(self) -> None:
        self.counts = [0] * SHARD  # blocks by replica
        self.num_pairs = 0  # their sum
        self._allocate(_LEAST_ROWS)

    def _allocate(self, num_rows: int) -> None:
        self._num_taken = 0  # rows with a key
        self._keys = np.zeros(num_rows, np.uint64)
        self._masks = np.zeros(num_rows, np.uint64)
        self.used = np.zeros(num_rows, np.uint32)

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes + self._masks.nbytes + self.used.nbytes)

    def taken(self) -> np.ndarray:
        """Return a boolean for each row: does a replica have its block?"""
        return self._masks != 0

    def add(self, bit: int, keys: Keys, now: int) -> None:
        """Note that a replica has these blocks, each given once."""
        if self._num_taken + len(keys) > _FULL * len(self._keys):
            self._rebuild(len(keys))
        rows = self._insert(keys)
        flag = np.uint64(1 << bit)
        self._count(bit, int(np.count_nonzero(self._masks[rows] & flag == 0)))
        self._masks[rows] |= flag
        self.used[rows] = now

    def remove(self, bit: int, keys: Keys) -> None:
        """Note that a replica does not have these blocks, each given once."""
        rows = self._find(keys)
        rows = rows[self._keys[rows] == keys]
        flag = np.uint64(1 << bit)
        self._count(bit, -int(np.count_nonzero(self._masks[rows] & flag)))
        self._masks[rows] &= ~flag

    def remove_replica(self, bit: int) -> None:
        self._masks &= ~np.uint64(1 << bit)
        self._count(bit, -self.counts[bit])

    def _count(self, bit: int, num_more: int) -> None:
        self.counts[bit] += num_more
        self.num_pairs += num_more

    def evict(self, rows: np.ndarray) -> None:
        """Forget these rows, for all replicas."""
        masks = self._masks[rows]
        for bit, count in enumerate(self.counts):
            if count:
                self._count(bit, -int(np.count_nonzero(masks & np.uint64(1 << bit))))
        self._masks[rows] = 0

    def match(self, keys: Keys, now: int) -> list[tuple[int, int]]:
        """Return (bit, leading blocks) of the replicas that have the first of these blocks."""
        found: list[tuple[int, int]] = []
        first, count, having = 0, _FIRST_MATCHED, ~np.uint64(0)
        while having and first < len(keys):
            part = keys[first : first + count]
            rows = self._find(part)
            masks = np.where(self._keys[rows] == part, self._masks[rows], 0)
            held = np.bitwise_and.accumulate(np.concatenate(([having], masks)))  # all blocks before each
            self.used[rows[held[1:] != 0]] = now
            for end in np.flatnonzero(held[1:] != held[:-1]).tolist():
                if first + end:
                    found += [(bit, first + end) for bit in _bits(held[end] & ~held[end + 1])]
            having, first, count = held[-1], first + count, 4 * count
        return found + [(bit, len(keys)) for bit in _bits(having)]

    def _find(self, keys: Keys) -> np.ndarray:
        """Return the row of each key, or the empty row where it would be.

        A key is in its bucket or, if that is full, in the next one that is not. Buckets fill from the front.
        """
        table = self._keys.reshape(-1, _BUCKET)
        num_buckets = np.uint64(len(table))
        shift = np.uint64(32)
        buckets = (((keys >> shift) * num_buckets) >> shift).astype(np.int64)
        rows, moving = np.empty_like(buckets), np.arange(len(keys))
        while len(moving):
            held = table[buckets[moving]]
            fits = (held == keys[moving, None]) | (held == 0)
            first = fits.argmax(axis=1)
            rows[moving] = buckets[moving] * _BUCKET + first
            moving = moving[~fits[np.arange(len(moving)), first]]
            buckets[moving] = (buckets[moving] + 1) % len(table)
        return rows

    def _insert(self, keys: Keys) -> np.ndarray:
        """Return the row of each key, which is taken for it if it has none. There must be rows enough."""
        rows = self._find(keys)
        lacking = np.flatnonzero(self._keys[rows] != keys)
        self._num_taken += len(lacking)
        while len(lacking):  # of several keys that want the same row the last gets it
            self._keys[rows[lacking]] = keys[lacking]
            lacking = lacking[self._keys[rows[lacking]] != keys[lacking]]
            rows[lacking] = self._find(keys[lacking])
        return rows

    def _rebuild(self, num_more: int) -> None:
        """Make a table of the blocks that replicas have, with room for more; never hold much of both."""
        kept = self.taken()
        keys, self._keys = self._keys[kept], np.zeros(0, np.uint64)
        masks, self._masks = self._masks[kept], np.zeros(0, np.uint64)
        used, self.used = self.used[kept], np.zeros(0, np.uint32)
        num_buckets = int(_ROWS_PER_BLOCK * (len(keys) + num_more)) // _BUCKET + 1
        self._allocate(max(_LEAST_ROWS, _BUCKET * num_buckets))
        for first in range(0, len(keys), CHUNK):
            part = slice(first, first + CHUNK)
            rows = self._insert(keys[part])
            self._masks[rows], self.used[rows] = masks[part], used[part]


def _bits(mask: np.uint64) -> list[int]:
    """Return the numbers of the bits that are set."""
    rest, bits = int(mask), []
    while rest:
        bits.append(rest.bit_length() - 1)
        rest ^= 1 << bits[-1]
    return bits
