"""Sizes of the cache groups, in blocks, such that the same requests fit in all of them.

A group without a window holds every token of a request. One with a window holds the blocks within the window
and those added by a step; a step's tokens are shared by all requests, so they are counted once. A quarter
of that is added for prefix hits. States are kept for every slot, used or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.program.caches import CacheSpec
from quire.program.program import Program

HITS_SHARE = 4  # 1/4 of the blocks used by windows is added for prefix hits
SNAPSHOT_TOKENS = 1024  # approximate distance between two snapshots of the states of one sequence

BlockBytes = Callable[[CacheSpec], int]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table, with the bytes of one block of all of them; or of their states."""

    block_bytes: int
    window: int | None = None
    slot_bytes: int = 0
    snapshot_bytes: int = 0

    @classmethod
    def of(cls, layers: Sequence[CacheSpec], block_bytes: BlockBytes, window: int | None) -> CacheGroup:
        """Return the group of these layers; `layers` are their specs."""
        slots = sum(spec.slot_bytes for spec in layers)
        return cls(sum(map(block_bytes, layers)), window, slots, sum(spec.snapshot_bytes for spec in layers))


def by_spec(program: Program, block_bytes: BlockBytes) -> tuple[CacheGroup, ...]:
    """Return the groups of a program (Program.cache_groups), each with its own block table."""
    return tuple(
        CacheGroup.of([spec] * program.caches.count(spec), block_bytes, spec.window)
        for spec in program.cache_groups
    )


def with_more(groups: Sequence[CacheGroup], group: int, block_bytes: int) -> tuple[CacheGroup, ...]:
    """Return the groups with more bytes in each block of one: those of a draft model on its block table."""
    return tuple(
        replace(one, block_bytes=one.block_bytes + block_bytes * (index == group))
        for index, one in enumerate(groups)
    )


@dataclass(frozen=True, slots=True)
class Sizing:
    """Block counts by group. `step_tokens` is the maximum number of tokens in a step."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    step_tokens: int

    def blocks(self, num_requests: int, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group for `num_requests` of `num_tokens` each; 0 for states."""
        return tuple(self._blocks(group, num_requests, num_tokens) for group in self.groups)

    def _blocks(self, group: CacheGroup, num_requests: int, num_tokens: int) -> int:
        if not group.block_bytes:
            return 0
        whole = num_requests * self._ceil(num_tokens)
        if group.window is None:
            return whole
        used = num_requests * (self._ceil(group.window) + 2) + self._ceil(self.step_tokens)
        return min(whole, used + used // HITS_SHARE)

    def nbytes(self, blocks: Sequence[int]) -> int:
        """Return the bytes of these numbers of blocks, by group."""
        return sum(n * group.block_bytes for n, group in zip(blocks, self.groups, strict=True))

    def fit(self, budget: int, num_requests: int, num_tokens: int, longest: int) -> tuple[int, ...]:
        """Return blocks within `budget` bytes for up to `num_requests` of `num_tokens`, and one of `longest`.

        If not even the longest fits, for one request of the maximum length that does.
        """
        least = self.blocks(1, longest)
        if self.nbytes(least) > budget:
            length = _most(
                lambda blocks: self.nbytes(self.blocks(1, blocks * self.block_size)) <= budget,
                self._ceil(longest),
            )
            return self.blocks(1, length * self.block_size)

        def wanted(requests: int) -> tuple[int, ...]:
            return tuple(map(max, self.blocks(requests, num_tokens), least))

        fitting = _most(lambda requests: self.nbytes(wanted(requests)) <= budget, num_requests)
        if fitting == num_requests:
            return wanted(fitting)
        return self._rest(wanted(fitting), budget)

    def _rest(self, blocks: tuple[int, ...], budget: int) -> tuple[int, ...]:
        """Give the remaining budget to the groups without a window, for the start of one more request."""
        whole = [bool(group.block_bytes) and group.window is None for group in self.groups]
        each = sum(group.block_bytes for group, grows in zip(self.groups, whole, strict=True) if grows)
        more = (budget - self.nbytes(blocks)) // each if each else 0
        return tuple(n + more if grows else n for n, grows in zip(blocks, whole, strict=True))

    def longest(self, blocks: Sequence[int], most: int) -> int:
        """Return the length of the longest sequence that these blocks hold, at most `most`."""

        def holds(length: int) -> bool:
            wanted = self.blocks(1, length * self.block_size)
            return all(n <= have for n, have in zip(wanted, blocks, strict=True))

        return min(_most(holds, self._ceil(most)) * self.block_size, most)

    def tokens(self, blocks: Sequence[int]) -> int:
        """Return the total capacity in tokens: that of the groups without a window, if there are any."""
        paged = [(n, g.window) for n, g in zip(blocks, self.groups, strict=True) if g.block_bytes]
        whole = [n for n, window in paged if window is None] or [n for n, _ in paged]
        return min(whole, default=0) * self.block_size

    def snapshots(self, budget: int, num_requests: int, num_tokens: int) -> int:
        """Return the snapshots of all states that fit in `budget`, at most as many as these requests use."""
        each = sum(group.snapshot_bytes for group in self.groups)
        useful = num_requests * (-(-num_tokens // SNAPSHOT_TOKENS) + 1)
        return min(useful, budget // each) if each else 0

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to `limit` that fits; `fits` is monotonic, and 0 always fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
