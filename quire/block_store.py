"""The BlockStore protocol: contents of cache blocks outside the KV cache, by the hash of the block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

# The content of one block in each cache group that has it, by group index, as the backend gave it.
BlockContent = Mapping[int, bytes | memoryview]


class Found(NamedTuple):
    """The leading blocks of a chain that a store has, and the predicted time to fetch them, in seconds."""

    num_blocks: int
    seconds: float


class StoreCounters(NamedTuple):
    """Content of a store, and its events since the start, in blocks unless the name says otherwise."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_stored: int = 0
    num_fetched: int = 0
    num_evicted: int = 0
    num_damaged: int = 0  # in segments that were damaged, and removed
    num_declined: int = 0  # not stored, as too much was waiting to be written, or nothing could be


class Fetch(Protocol):
    """Blocks on their way from a store."""

    @property
    def done(self) -> bool:
        """True once nothing more will arrive."""

    @property
    def num_arrived(self) -> int:
        """Leading blocks that have arrived, as far as is known."""

    def take(self) -> list[tuple[bytes, BlockContent]]:
        """End the fetch; return (hash, content) of the leading blocks that have arrived, without waiting.

        What is damaged, truncated, foreign or gone is left out, with all blocks after it, without an error.
        """


class BlockStore(Protocol):
    """A place for contents of blocks: memory, files, another process. Used by the engine's thread only.

    No call but `close` waits for a file or a network. Everything is keyed by hashes, which cover tokens and
    salt; a store itself is made for one fingerprint (checkpoint, formats, build), and has nothing of another
    one.
    """

    def find(self, hashes: Sequence[bytes]) -> Found:
        """Return how many leading blocks of a chain are here, and the predicted time to fetch them."""

    def fetch(self, hashes: Sequence[bytes]) -> Fetch:
        """Begin to fetch these blocks."""

    @property
    def busy(self) -> bool:
        """True while so much waits to be written that nothing is wanted: ask again later."""

    def wants(self, block_hash: bytes, groups: Collection[int]) -> bool:
        """Return True if a block is not here with all of these groups, and there is room for it now."""

    def put(self, block_hash: bytes, content: BlockContent) -> None:
        """Keep a block if there is room for it; what was used least recently makes place.

        It replaces a content of the same block: that of a later one may have more groups.
        """

    def counters(self) -> Mapping[str, StoreCounters]:
        """Return what the store has and did, by the name of each place: "memory", "disk"."""

    def close(self) -> None:
        """Write what waits to be written, and release everything."""


class BlockAccess(Protocol):
    """Copies contents of blocks out of the caches of a device, and into them (quire.backends.backend)."""

    def block_bytes(self, group: int) -> int:
        """Return the size of the content of a block of a cache group."""

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Copy out blocks of a cache group, or snapshots, that no step in flight writes."""

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        """Replace the contents of blocks, or of snapshots. No step may be in flight."""
