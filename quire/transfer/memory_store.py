"""Blocks in memory beyond the KV cache, above a slower store if there is one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from quire.block_store import BlockContent, BlockStore, Fetch, Found, StoreCounters
from quire.transfer.content import content_bytes


class MemoryFetch:
    """Blocks that are in memory, among others that are on their way from the store below."""

    def __init__(self, hashes: Sequence[bytes], held: dict[bytes, BlockContent], below: Fetch | None) -> None:
        self._hashes, self._held, self._below = hashes, held, below

    @property
    def done(self) -> bool:
        """True once nothing more will arrive."""
        return self._below is None or self._below.done

    @property
    def num_arrived(self) -> int:
        """Leading blocks that have arrived."""
        left = 0 if self._below is None else self._below.num_arrived
        for number, block_hash in enumerate(self._hashes):
            if block_hash not in self._held:
                if not left:
                    return number
                left -= 1
        return len(self._hashes)

    def take(self) -> list[tuple[bytes, BlockContent]]:
        """End the fetch; return (hash, content) of the leading blocks that have arrived."""
        arrived = self._held | (dict(self._below.take()) if self._below is not None else {})
        leading = takewhile(arrived.__contains__, self._hashes)
        return [(block_hash, arrived[block_hash]) for block_hash in leading]


class MemoryStore:
    """A BlockStore of at most `limit_bytes`, the least recently used first to go. `below` gets all blocks."""

    def __init__(self, limit_bytes: int, below: BlockStore | None = None) -> None:
        self._limit_bytes, self._below = limit_bytes, below
        self._blocks: OrderedDict[bytes, BlockContent] = OrderedDict()
        self._num_bytes = 0
        self._counters = StoreCounters()

    def find(self, hashes: Sequence[bytes]) -> Found:
        """Return how many leading blocks are here or below, and the predicted time to fetch those below."""
        others = [block_hash for block_hash in hashes if block_hash not in self._blocks]
        below = self._below.find(others) if self._below is not None and others else Found(0, 0.0)
        if below.num_blocks == len(others):
            return Found(len(hashes), below.seconds)
        return Found(list(hashes).index(others[below.num_blocks]), below.seconds)

    def fetch(self, hashes: Sequence[bytes]) -> MemoryFetch:
        """Take these blocks from here, and begin to fetch the others from below."""
        held = {block_hash: self._blocks[block_hash] for block_hash in hashes if block_hash in self._blocks}
        for block_hash in held:
            self._blocks.move_to_end(block_hash)
        self._counters = self._counters._replace(num_fetched=self._counters.num_fetched + len(held))
        others = [block_hash for block_hash in hashes if block_hash not in held]
        below = self._below.fetch(others) if self._below is not None and others else None
        return MemoryFetch(hashes, held, below)

    @property
    def busy(self) -> bool:
        """True while the store below is busy."""
        return self._below is not None and self._below.busy

    def wants(self, block_hash: bytes, groups: Collection[int]) -> bool:
        """Return True if a block is not here with all of these groups, or not below and wanted there."""
        content = self._blocks.get(block_hash, {})
        here = content and all(group in content for group in groups)
        return not here or (self._below is not None and self._below.wants(block_hash, groups))

    def put(self, block_hash: bytes, content: BlockContent) -> None:
        """Keep a block, with the groups that are here already, and give it to the store below."""
        whole = {**self._blocks.get(block_hash, {}), **content}
        nbytes = content_bytes(whole)
        if nbytes <= self._limit_bytes:
            self._num_bytes += nbytes - content_bytes(self._blocks.pop(block_hash, {}))
            self._blocks[block_hash] = whole
            num_evicted = 0
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= content_bytes(self._blocks.popitem(last=False)[1])
                num_evicted += 1
            counts = self._counters
            self._counters = counts._replace(
                num_stored=counts.num_stored + 1, num_evicted=counts.num_evicted + num_evicted
            )
        if self._below is not None:
            self._below.put(block_hash, content)

    def counters(self) -> Mapping[str, StoreCounters]:
        """Return those of "memory", and those of the store below."""
        own = self._counters._replace(num_blocks=len(self._blocks), num_bytes=self._num_bytes)
        return {"memory": own} | (dict(self._below.counters()) if self._below is not None else {})

    def close(self) -> None:
        """Forget all blocks, and close the store below."""
        self._blocks.clear()
        self._num_bytes = 0
        if self._below is not None:
            self._below.close()
