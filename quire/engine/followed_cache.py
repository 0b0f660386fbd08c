"""Changes of what can be found in the caches, for a router that keeps a map of them.

A block can be found if every group of blocks without a window has it: these are the groups in which prefix
matching counts leading blocks. Groups with a window and states may then allow less, which is not told here: a
router learns it from the tokens that requests found cached. A model with only such groups tells nothing.
"""

from __future__ import annotations

from quire.engine.blocks import BlockPool
from quire.engine.caches import Caches
from quire.engine.status import HASH_PREFIX_BYTES, CacheChanges


class FollowedCache:
    """Collects the hashes of blocks that were registered or forgotten, from now until `stop`."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._pools: list[BlockPool] | None = None  # those that are followed
        self._changed: dict[bytes, None] = {}

    @property
    def is_whole_due(self) -> bool:
        """True if the next changes are all that can be found: at first, and after the caches were emptied."""
        return self._pools is not self._caches.whole

    def take(self) -> CacheChanges | None:
        """Return the changes since the last call, None if there are none."""
        whole, changed = self.is_whole_due, self._changed
        if whole:
            changed = self._follow()
        elif not changed:
            return None
        stored: list[bytes] = []
        evicted: list[bytes] = []
        for block_hash in changed:
            found = all(pool.find(block_hash) is not None for pool in self._caches.whole)
            (stored if found else evicted).append(block_hash[:HASH_PREFIX_BYTES])
        self._changed.clear()
        return CacheChanges(b"".join(stored), b"".join(evicted), whole)

    def stop(self) -> None:
        """Collect no more."""
        for pool in self._pools or ():
            pool.changed = None

    def _follow(self) -> dict[bytes, None]:
        """Begin to collect from the pools of now; return the hashes in one of them."""
        self.stop()
        self._pools = self._caches.whole
        for pool in self._pools:
            pool.changed = self._changed
        return dict.fromkeys(self._pools[0].findable()) if self._pools else {}
