"""Loading: making room in the cache groups for contents of blocks that come from elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Series

from quire.engine.blocks import BlockPool
from quire.engine.caches import Caches
from quire.engine.request import Sequence
from quire.types import BlockLoad

Range = tuple[int, BlockPool, int]  # a cache group, its pool, and the first block that is needed in it


def load(
    caches: Caches, sequence: Sequence, first: int, groups: Series[Collection[int]], num_spare: int
) -> list[BlockLoad]:
    """Register the blocks that lengthen the cached prefix of a sequence; return those to be written.

    There is content for blocks first, first + 1, ... of its text, in these cache groups. In each group
    `num_spare` free blocks are left. All blocks are released: the next match finds them.
    """
    limit = min(first + len(groups), sequence.num_reusable() // caches.block_size)
    for index in range(limit):
        sequence.block_hash(index, caches.block_size)
    offered = {(group, i) for i, own in enumerate(groups, first) for group in own}
    number = _num_usable(caches, sequence, limit, offered, num_spare)
    ranges = _needed(caches, number)
    if not all(_has_room(pool, sequence.chain[start:number], num_spare) for _, pool, start in ranges):
        return []  # groups with windows or states are too small: without them the others are of no use
    loads = []
    for group, pool, start in ranges:
        blocks = _take(pool, sequence.chain[start:number])
        loads += [BlockLoad(group, block, start + i) for i, block in blocks]
    return loads


def _needed(caches: Caches, number: int) -> list[Range]:
    """Return which blocks a sequence needs to continue after `number` blocks: from where to there."""
    if not number:
        return []
    position = number * caches.block_size
    paged = [(one.index, one.pool, one.first_visible(position)) for one in caches.paged]
    return paged + [(one.index, one.pool, number - 1) for one in caches.states]


def _num_usable(
    caches: Caches, sequence: Sequence, limit: int, offered: Collection[tuple[int, int]], num_spare: int
) -> int:
    """Return the most leading blocks to continue after, up to `limit`, with what is cached and offered.

    Groups without a window must have room for theirs.
    """
    chain = sequence.chain[:limit]
    usable, runs = 0, dict.fromkeys((one.index for one in caches.paged), 0)  # consecutive blocks, up to this
    rooms = {one.index: _room(one.pool, chain, num_spare) for one in caches.paged if not one.group.window}
    for number, block_hash in enumerate(chain, 1):
        fits = True
        for paged in caches.paged:
            group, cached = paged.index, paged.pool.find(block_hash) is not None
            runs[group] = runs[group] + 1 if cached or (group, number - 1) in offered else 0
            if group in rooms:
                rooms[group] -= not cached
                if rooms[group] < 0 or not runs[group]:
                    return usable
            fits = fits and number - runs[group] <= paged.first_visible(number * caches.block_size)
        for states in caches.states:
            cached = states.pool.find(block_hash) is not None
            fits = fits and (cached or (states.index, number - 1) in offered)
        if fits and sequence.request.whole_at(number * caches.block_size) is None:
            usable = number
    return usable


def _room(pool: BlockPool, chain: Series[bytes], num_spare: int) -> int:
    """Return how many blocks may be taken, those of the chain left where they are."""
    cached = [block for block in map(pool.find, chain) if block is not None]
    return pool.num_free - pool.num_idle(cached) - num_spare


def _has_room(pool: BlockPool, chain: Series[bytes], num_spare: int) -> bool:
    """Return True if there is room for the blocks of the chain that are not cached."""
    return sum(pool.find(one) is None for one in chain) <= max(0, _room(pool, chain, num_spare))


def _take(pool: BlockPool, chain: Series[bytes]) -> list[tuple[int, int]]:
    """Register what the pool lacks of these blocks; return (index in the chain, block) of each."""
    found = [pool.find(block_hash) for block_hash in chain]
    pool.share([block for block in found if block is not None])  # or they might be reused
    taken = pool.allocate(found.count(None))
    left = iter(taken)
    table = [next(left) if block is None else block for block in found]
    for block, block_hash in zip(table, chain, strict=True):
        pool.register(block, block_hash)
    pool.release(table)
    return [(i, block) for i, (was, block) in enumerate(zip(found, table, strict=True)) if was is None]
