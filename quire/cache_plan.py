"""Sizes of the cache groups, in blocks, by which the same requests fit in all of them.

A group without a window holds every token of a request. One with a window holds the blocks that are in sight
and those that a step brings; a step's tokens are shared by all requests, so they are counted once. A quarter
of that is added, for beginnings that may be found again. States are kept for every slot, used or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.program.caches import CacheSpec
from quire.program.program import Program

HITS_SHARE = 4  # one part in so many of what a window has in use is added for prefix hits
SNAPSHOT_TOKENS = 1024  # between two snapshots of the states of one sequence, about

BlockBytes = Callable[[CacheSpec], int]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table: bytes of a block over all of them, or of states (then it has none)."""

    block_bytes: int
    window: int | None = None
    slot_bytes: int = 0
    snapshot_bytes: int = 0

    @classmethod
    def of(cls, layers: Sequence[CacheSpec], block_bytes: BlockBytes, window: int | None) -> CacheGroup:
        """`layers` are the specs of all layers of the group."""
        slots = sum(spec.slot_bytes for spec in layers)
        return cls(sum(map(block_bytes, layers)), window, slots, sum(spec.snapshot_bytes for spec in layers))


def by_spec(program: Program, block_bytes: BlockBytes) -> tuple[CacheGroup, ...]:
    """The groups of a program (Program.cache_groups), each with a table of its own."""
    return tuple(
        CacheGroup.of([spec] * program.caches.count(spec), block_bytes, spec.window)
        for spec in program.cache_groups
    )


@dataclass(frozen=True, slots=True)
class Sizing:
    """Counts blocks of groups. `step_tokens` is the most that a step computes."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    step_tokens: int

    def blocks(self, num_requests: int, num_tokens: int) -> tuple[int, ...]:
        """Blocks of each group for so many requests of so many tokens each; none for states."""
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
        """Bytes of so many blocks of each group."""
        return sum(n * group.block_bytes for n, group in zip(blocks, self.groups, strict=True))

    def fit(self, budget: int, num_requests: int, num_tokens: int, longest: int) -> tuple[int, ...]:
        """Blocks within `budget` bytes for at most so many requests of `num_tokens`, and one of `longest`.

        Where not even that one fits, for one that is as long as can be.
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
        """Give what is left to the groups without a window: the beginning of one more request."""
        whole = [bool(group.block_bytes) and group.window is None for group in self.groups]
        each = sum(group.block_bytes for group, grows in zip(self.groups, whole, strict=True) if grows)
        more = (budget - self.nbytes(blocks)) // each if each else 0
        return tuple(n + more if grows else n for n, grows in zip(blocks, whole, strict=True))

    def longest(self, blocks: Sequence[int], most: int) -> int:
        """Tokens of the longest sequence that so many blocks of each group hold, at most `most`."""

        def holds(length: int) -> bool:
            wanted = self.blocks(1, length * self.block_size)
            return all(n <= have for n, have in zip(wanted, blocks, strict=True))

        return min(_most(holds, self._ceil(most)) * self.block_size, most)

    def tokens(self, blocks: Sequence[int]) -> int:
        """Tokens that the cache holds in all: of the groups without a window, where there are any."""
        paged = [(n, g.window) for n, g in zip(blocks, self.groups, strict=True) if g.block_bytes]
        whole = [n for n, window in paged if window is None] or [n for n, _ in paged]
        return min(whole, default=0) * self.block_size

    def snapshots(self, budget: int, num_requests: int, num_tokens: int) -> int:
        """Snapshots of all states within `budget`, at most what requests of this number and length take."""
        each = sum(group.snapshot_bytes for group in self.groups)
        useful = num_requests * (-(-num_tokens // SNAPSHOT_TOKENS) + 1)
        return min(useful, budget // each) if each else 0

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The greatest number from 0 to `limit` that fits; fewer fit where more do, and 0 always."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
