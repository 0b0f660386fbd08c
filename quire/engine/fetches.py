"""Fetches: what the cache lacks of a new request comes from a store, where that is faster than computing it.

Until it has come the request is held here; the scheduler does not know of it, and others go on. One fetch
runs at a time, so that fetches do not share the rate of a disk or a link; the requests after it are in line.

A fetch is begun if its predicted time is well below that of computing its blocks, by the law of steps. It
ends when all blocks have arrived, or as soon as waiting takes longer than computing what has arrived, and a
small share of what was asked for: then the request is computed from there on. So whatever happens to the
store, no request is later by more than that share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from quire.block_store import BlockAccess, BlockContent, BlockStore, Fetch
from quire.engine.request import ScheduledRequest, Sequence
from quire.types import NewRequest

if TYPE_CHECKING:
    from quire.engine.scheduler import Scheduler

POLL_S = 0.0005  # between two looks at a fetch, when there is nothing else to do
MAX_LOSS = 0.05  # of the time of computing what is asked for
MARGIN = 0.7  # of the time of computing it: a fetch that is predicted to take longer is not begun
MIN_GAIN_S = 0.002  # below this, looking at it takes as long
TOKEN_S = 0.001  # to compute a token, as long as no law is known
LEARNING = 0.3  # how far the time that a fetch took moves what is expected of the next ones
FORGETTING = 0.02  # how far each one that was not begun moves it back
MAX_SLOWNESS = 100.0


class LoadedBlocks(NamedTuple):
    """Blocks that were loaded into the caches: their tokens and bytes, and the time that copying took."""

    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: LoadedBlocks) -> LoadedBlocks:
        """Return the sum."""
        num_tokens, num_bytes = self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes
        return LoadedBlocks(num_tokens, num_bytes, self.seconds + other.seconds)


@dataclass(slots=True)
class _Held:
    """A request that waits for the blocks [first, end) of its first sequence, or to ask for them."""

    request: NewRequest
    sequence: Sequence
    brought: Fetch | None  # blocks that come with the request
    fetch: Fetch | None = None
    began_s: float = 0.0
    predicted_s: float = 0.0
    first: int = 0
    end: int = 0
    compute_s: float = 0.0  # of all of them
    num_arrived: int = 0  # as seen last, and the time of computing those
    arrived_s: float = 0.0


class Fetches:
    """Requests that wait for blocks, in the order of their arrival.

    `store` has blocks of any request; a request may also bring some. `blocks` copies them into the caches.
    """

    def __init__(
        self, scheduler: Scheduler, blocks: BlockAccess, store: BlockStore | None, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._store = store
        self._clock = clock
        self._line: deque[_Held] = deque()
        self._slowness = 1.0  # fetches take so many times as long as predicted

    def __contains__(self, request_id: str) -> bool:
        return any(held.request.request_id == request_id for held in self._line)

    def __len__(self) -> int:
        return len(self._line)

    @property
    def num_sequences(self) -> int:
        """Sequences of the requests that wait, but for those that another engine has ended."""
        return sum(not one.finished for held in self._line for one in held.sequence.request.sequences)

    @property
    def over(self) -> bool:
        """True if the first request in line waits no longer."""
        if not self._line:
            return False
        held = self._line[0]
        if held.fetch is None or held.fetch.done:
            return True
        if (num_arrived := held.fetch.num_arrived) != held.num_arrived:
            held.num_arrived = num_arrived
            held.arrived_s = self._compute_s(held.first, min(held.end, held.first + num_arrived))
        return self._clock() - held.began_s > held.arrived_s + MAX_LOSS * held.compute_s

    def hold(self, request: NewRequest, brought: Fetch | None) -> bool:
        """Hold a request back, and return True, if blocks for it are worth waiting for."""
        scheduler = self._scheduler
        nowhere = self._store is None and brought is None
        if nowhere or request.pooling or not scheduler.caches.retains:
            return False
        opened = ScheduledRequest.of(request, scheduler.max_model_len, scheduler.block_size, private=False)
        sequence = next(one for one in opened.sequences if not one.finished)
        held = _Held(request, sequence, brought)
        if not (self._plan(held) if self._line else self._begin(held)):
            if brought is not None:
                brought.take()
            return False
        self._line.append(held)
        return True

    def take(self) -> tuple[NewRequest, float, LoadedBlocks]:
        """Load what has arrived for the first request in line, and give it up; begin the next fetch.

        No step may be in flight. Return the request, how long it waited for its fetch, and what was loaded.
        """
        held, loaded, waited_s = self._line.popleft(), LoadedBlocks(), 0.0
        if held.fetch is not None:
            waited_s = self._clock() - held.began_s
            loaded = self._load(held, dict(held.fetch.take()))
            if held.predicted_s > MIN_GAIN_S:
                seen = min(MAX_SLOWNESS, (waited_s + loaded.seconds) / held.predicted_s)
                self._slowness += LEARNING * (seen - self._slowness)
        if self._line:
            self._begin(self._line[0])  # or the cache has its blocks by now, and it is over at once
        return held.request, waited_s, loaded

    def drop(self, request_id: str) -> NewRequest | None:
        """Give up a request that is held, without its blocks; None if it is not."""
        for held in self._line:
            if held.request.request_id == request_id:
                first = held is self._line[0]
                self._line.remove(held)
                if held.fetch is not None:
                    held.fetch.take()
                if first and self._line:
                    self._begin(self._line[0])
                return held.request
        return None

    def _plan(self, held: _Held) -> bool:
        """Choose the blocks to ask for; return False if waiting for them is not worth it."""
        match = self._scheduler.caches.match(held.sequence)
        chain, held.first = held.sequence.chain, match.num_blocks
        held.end = held.sequence.num_reusable() // self._scheduler.block_size
        for index in range(held.end):
            held.sequence.block_hash(index, self._scheduler.block_size)
        if held.brought is None and self._store is not None and held.first < held.end:
            found = self._store.find(chain[: held.end])
            held.end = found.num_blocks
            held.predicted_s = found.seconds * (held.end - held.first) / max(1, held.end)
        if held.end <= held.first:
            return False
        held.compute_s = self._compute_s(held.first, held.end)
        if held.brought is not None:
            return True
        if held.predicted_s * self._slowness < MARGIN * held.compute_s - MIN_GAIN_S:
            return True
        self._slowness += FORGETTING * (1.0 - self._slowness)
        return False

    def _begin(self, held: _Held) -> bool:
        """Begin a fetch; return False if it is not worth it."""
        if not self._plan(held):
            return False
        held.began_s, held.fetch = self._clock(), held.brought
        if held.fetch is None and self._store is not None:
            held.fetch = self._store.fetch(held.sequence.chain[held.first : held.end])
        return True

    def _compute_s(self, first: int, end: int) -> float:
        """Return the predicted time of computing blocks [first, end) of a text."""
        size, law = self._scheduler.block_size, self._scheduler.law
        if law is None:
            return (end - first) * size * TOKEN_S
        return law.text_s(first * size, end * size, self._scheduler.max_num_batched_tokens)

    def _load(self, held: _Held, contents: Mapping[bytes, BlockContent]) -> LoadedBlocks:
        """Write what the caches have room for and no content of, of these blocks."""
        began_s, blocks = self._clock(), self._blocks
        offered = [self._fitting(contents.get(one, {})) for one in held.sequence.chain]
        first = next((index for index, content in enumerate(offered) if content), len(offered))
        loads = self._scheduler.load(held.request, first, [content.keys() for content in offered[first:]])
        num_bytes = 0
        for group, own in groupby(sorted(loads), key=lambda load: load.group):
            block_ids, written = zip(*((one.block_id, offered[one.index][group]) for one in own), strict=True)
            blocks.write_blocks(group, block_ids, written)
            num_bytes += sum(map(len, written))
        num_tokens = len({load.index for load in loads}) * self._scheduler.block_size
        return LoadedBlocks(num_tokens, num_bytes, self._clock() - began_s)

    def _fitting(self, content: BlockContent) -> BlockContent:
        """Return the part of a content that has the sizes of blocks here: another engine may have sent it."""
        groups = range(len(self._scheduler.caches.groups))
        return {
            group: one
            for group, one in content.items()
            if group in groups and len(one) == self._blocks.block_bytes(group)
        }
