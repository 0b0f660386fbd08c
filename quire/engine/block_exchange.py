"""BlockExchange: contents of blocks between the caches of an engine and whatever else has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.block_store import BlockAccess, BlockContent, BlockStore, Fetch, StoreCounters
from quire.engine.fetches import POLL_S, Fetches, LoadedBlocks
from quire.engine.kept_blocks import KeptBlocks, places_of, read
from quire.types import NewRequest, Output

if TYPE_CHECKING:
    from quire.engine.scheduler import Scheduler

BUSY_S = 0.05  # until a store that is busy is asked again
TELL_S = 1.0
STEP_BYTES = 16 << 20  # kept of each step, while the device computes: some milliseconds


class BlockExchange:
    """Requests that wait for blocks, blocks that are kept in a store, and blocks for other engines.

    Without a `store` only blocks that come with requests are loaded, and none are kept.
    """

    def __init__(
        self, scheduler: Scheduler, blocks: BlockAccess, store: BlockStore | None, clock: Callable[[], float]
    ) -> None:
        self.store = store
        self._scheduler = scheduler
        self._blocks = blocks
        self._fetches = Fetches(scheduler, blocks, store, clock)
        self._kept: KeptBlocks | None = None
        if store is not None and scheduler.caches.retains:
            self._kept = KeptBlocks(scheduler.caches, blocks, store)
        self._fetch_s: dict[str, float] = {}  # by open request: how long it waited for blocks
        self._loaded = LoadedBlocks()  # since the last step was planned
        self._clock = clock
        self._told_s = clock()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._fetches

    @property
    def num_held(self) -> int:
        """Sequences of the requests that wait for blocks."""
        return self._fetches.num_sequences

    @property
    def over(self) -> bool:
        """True if some request waits no longer: `take` gives it, when no step is in flight."""
        return self._fetches.over

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is something to do; None if a call must come first."""
        if self._fetches:
            return 0.0 if self._fetches.over or self._tells() else POLL_S
        if self._kept is None or not self._kept.waiting:
            return None
        return BUSY_S if self.store is not None and self.store.busy else 0.0

    def hold(self, request: NewRequest, brought: Fetch | None) -> bool:
        """Hold a request back, and return True, if blocks for it are worth waiting for."""
        return self._fetches.hold(request, brought)

    def drop(self, request_id: str) -> NewRequest | None:
        """Give up a request that is held, without its blocks; None if it is not."""
        return self._fetches.drop(request_id)

    def take(self) -> list[NewRequest]:
        """Load what has arrived for the requests that wait no longer, and give them up."""
        requests = []
        while self._fetches.over:
            request, waited_s, loaded = self._fetches.take()
            self._loaded = self._loaded.plus(loaded)
            self._fetch_s[request.request_id] = waited_s
            requests.append(request)
        return requests

    def take_progress(self) -> bool:
        """Return True once in TELL_S while requests wait for blocks: the engine is at work without steps."""
        if not self._tells():
            return False
        self._told_s = self._clock()
        return True

    def _tells(self) -> bool:
        return bool(self._fetches) and self._clock() - self._told_s >= TELL_S

    def take_loaded(self) -> LoadedBlocks:
        """Return what was loaded since the last call."""
        loaded, self._loaded = self._loaded, LoadedBlocks()
        return loaded

    def copy(self) -> None:
        """Copy some of the blocks that are to be kept to the store."""
        if self._kept is not None:
            self._kept.copy(STEP_BYTES)

    def counters(self) -> Mapping[str, StoreCounters] | None:
        """Return the counters of the store by place, if there is a store."""
        return None if self.store is None else self.store.counters()

    def read(self, hashes: Iterable[bytes]) -> list[tuple[bytes, BlockContent]]:
        """Copy out the leading blocks of a chain that are in the cache, between two steps."""
        found: list[tuple[bytes, BlockContent]] = []
        for block_hash in hashes:
            if any(pool.find(block_hash) is None for pool in self._scheduler.caches.whole):
                break
            found.append((block_hash, read(self._blocks, places_of(self._scheduler.caches, block_hash))))
        return found

    def with_fetch_times(self, outputs: list[Output]) -> list[Output]:
        """Return outputs with the times that their requests waited for blocks."""
        if not self._fetch_s:
            return outputs
        found = []
        for output in outputs:
            fetch_s = self._fetch_s.get(output.request_id)
            if fetch_s is not None and output.metrics is not None:
                output = output._replace(metrics=replace(output.metrics, fetch_s=fetch_s))
            found.append(output)
        for output in outputs:
            if output.finish_reason is not None and output.request_id not in self._scheduler:
                self._fetch_s.pop(output.request_id, None)
        return found

    def close(self, whole: bool) -> None:
        """Close the store; if the caches are `whole`, first copy all that is to be kept."""
        if self._kept is not None and whole:
            self._kept.copy(sys.maxsize)
        if self.store is not None:
            self.store.close()
