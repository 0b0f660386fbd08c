"""The cache groups of a model: block tables of sequences, prefix matching, snapshots of states.

Layers with the same cache spec form a group: keys and values of all positions, in blocks; or of those within
a window; or one state per slot. Each group has its own pool, and every sequence a block table in it. All
groups identify cached content by the same chain of hashes, so a prefix can be reused if every group has kept
what the next position needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.blocks import BlockPool
from quire.engine.request import Sequence, Table
from quire.types import Grant, Snapshot


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that keep keys and values, in blocks. With a `window` a token sees so many, itself included."""

    num_blocks: int
    window: int | None = None

    def num_held(self, num_tokens: int, block_size: int, num_batched_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at once, given the size of a step."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window + num_batched_tokens) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep one state per slot. Snapshots of it are taken at some block boundaries.

    These are every `every`-th one, and the last from which a prompt can be continued.
    """

    num_snapshots: int
    every: int


Group = BlockGroup | StateGroup


@dataclass(frozen=True, slots=True)
class Paged:
    """A group of blocks, with its index among all groups."""

    index: int
    group: BlockGroup
    pool: BlockPool
    block_size: int

    def first_visible(self, position: int) -> int:
        """Return the first table entry visible from `position` and later positions."""
        window = self.group.window
        return 0 if window is None else max(0, position - window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class _States:
    """A group of states, with its index among all groups; the pool holds snapshots."""

    index: int
    every: int
    pool: BlockPool


class Match(NamedTuple):
    """A cached prefix of a sequence: its number of blocks, and the visible ones in each group."""

    num_blocks: int
    tables: list[Table]


class Caches:
    """The pools of all groups: allocation, growth, prefix matching and release for sequences.

    `num_batched_tokens` is the maximum of a step. Without `retain` nothing outlives its holders except
    snapshots of states, which only the sequences of one request can find.
    """

    def __init__(
        self, groups: Iterable[Group], block_size: int, num_batched_tokens: int, retain: bool = True
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self._num_batched_tokens = num_batched_tokens
        self.retains = retain
        self._entered: dict[bytes, None] | None = None
        self.forget()

    def forget(self) -> None:
        """Return to the state after the constructor. No sequence may hold anything."""
        retain, block_size = self.retains, self.block_size
        self.paged: list[Paged] = []
        self.states: list[_States] = []
        for index, group in enumerate(self.groups):
            if isinstance(group, BlockGroup):
                pool = BlockPool(group.num_blocks, retain)
                self.paged.append(Paged(index, group, pool, block_size))
            else:
                self.states.append(_States(index, group.every, BlockPool(group.num_snapshots)))
        self.whole = [paged.pool for paged in self.paged if paged.group.window is None]
        self._windowed = [paged for paged in self.paged if paged.group.window is not None]
        self._partial = [paged.pool for paged in self._windowed] + [states.pool for states in self.states]
        if self._entered is not None:
            self.note_entered()

    def note_entered(self) -> dict[bytes, None]:
        """Return a collection of the hashes that are registered from now on, in any group."""
        if self._entered is None:
            self._entered = {}
        for _, pool in self.pools:
            pool.entered = self._entered
        return self._entered

    @property
    def pools(self) -> list[tuple[int, BlockPool]]:
        """The pool of each group, with the index of the group."""
        paged = [(group.index, group.pool) for group in self.paged]
        return paged + [(group.index, group.pool) for group in self.states]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(paged.group.num_blocks for paged in self.paged)

    @property
    def num_free(self) -> int:
        """Blocks not held by any sequence."""
        return sum(paged.pool.num_free for paged in self.paged)

    # Before admission

    def has_room(self, sequence: Sequence, num_spare: int) -> bool:
        """Return True if each group has the free blocks that a sequence needs, and `num_spare` more."""
        for paged, num_wanted in zip(self.paged, sequence.num_wanted, strict=False):
            if num_wanted + num_spare > paged.pool.num_free:
                return False
        return True

    def may_want_less(self, sequence: Sequence) -> bool:
        """Return True if blocks of its prefix were registered, or taken, since the last attempt."""
        if sequence.num_revived != self._num_revived():
            return True
        if sequence.num_usable < sequence.num_found and sequence.num_entered != self._num_entered():
            return True
        index = sequence.num_found
        if index >= sequence.num_reusable() // self.block_size:
            return False
        block_hash = sequence.block_hash(index, self.block_size)
        return all(pool.find(block_hash) is not None for pool in self.whole)

    def match(self, sequence: Sequence) -> Match:
        """Find the longest cached prefix that the sequence can continue from; record the blocks it needs."""
        sequence.num_found = self._num_whole(sequence)
        sequence.num_usable = num_blocks = self._num_usable(sequence, sequence.num_found)
        sequence.num_revived, sequence.num_entered = self._num_revived(), self._num_entered()
        tables, wanted = [], []
        for paged in self.paged:
            first = paged.first_visible(num_blocks * self.block_size)
            found = [paged.pool.find(block_hash) for block_hash in sequence.chain[first:num_blocks]]
            table = Table(first, [block for block in found if block is not None])
            tables.append(table)
            num_fresh = self._end_of_admission(paged, sequence, first) - num_blocks
            wanted.append(num_fresh + paged.pool.num_idle(table.blocks))
        sequence.num_wanted = tuple(wanted)
        return Match(num_blocks, tables)

    def _num_whole(self, sequence: Sequence) -> int:
        """Count the leading blocks that every group without a window has cached."""
        limit = sequence.num_reusable() // self.block_size
        for index in range(limit):
            block_hash = sequence.block_hash(index, self.block_size)
            for pool in self.whole:
                if pool.find(block_hash) is None:
                    return index
        return limit

    def _num_usable(self, sequence: Sequence, num_found: int) -> int:
        """Return how many of these leading blocks every group can continue from, in one pass."""
        request = sequence.request
        if not self._partial:
            while request.whole_at(num_found * self.block_size) is not None:
                num_found -= 1
            return num_found
        usable = 0
        runs = [0] * len(self._windowed)  # consecutive blocks found, up to this one
        for number, block_hash in enumerate(sequence.chain[:num_found], 1):
            fits = all(states.pool.find(block_hash) is not None for states in self.states)
            for i, paged in enumerate(self._windowed):
                runs[i] = 0 if paged.pool.find(block_hash) is None else runs[i] + 1
                fits = fits and number - runs[i] <= paged.first_visible(number * self.block_size)
            if fits and request.whole_at(number * self.block_size) is None:
                usable = number
        return usable

    def _end_of_admission(self, paged: Paged, sequence: Sequence, first: int) -> int:
        """Return the end of a table at admission: at the known tokens, or at the limit of the group."""
        whole = -(-sequence.num_known // self.block_size)
        if paged.group.window is None:
            return whole
        held = paged.group.num_held(sequence.num_known, self.block_size, self._num_batched_tokens)
        return min(whole, first + held)

    def _num_revived(self) -> int:
        return sum(paged.pool.num_revived for paged in self.paged)

    def _num_entered(self) -> int:
        return sum(pool.num_registered for pool in self._partial)

    # While a sequence runs

    def admit(self, sequence: Sequence, match: Match) -> tuple[list[Grant], list[Snapshot]]:
        """Allocate for a sequence with a slot. Return its grants, and the snapshots to restore."""
        grants, restored = [], []
        for paged, table in zip(self.paged, match.tables, strict=True):
            paged.pool.share(table.blocks)
            end = self._end_of_admission(paged, sequence, table.first)
            table.blocks += paged.pool.allocate(end - match.num_blocks)
            grants.append(Grant(sequence.slot, paged.index, table.first, tuple(table.blocks)))
        for states in self.states if match.num_blocks else ():
            snapshot = states.pool.find(sequence.chain[match.num_blocks - 1])
            assert snapshot is not None, "a match ends where every state is kept"
            states.pool.share([snapshot])
            states.pool.release([snapshot])  # the last to be evicted
            restored.append(
                Snapshot(sequence.slot, states.index, match.num_blocks * self.block_size, snapshot)
            )
        sequence.tables = match.tables
        sequence.capacity = self._capacity(sequence)
        sequence.num_registered = match.num_blocks
        sequence.num_wanted = ()
        return grants, restored

    def _capacity(self, sequence: Sequence) -> int:
        """Return the positions that every table of a sequence has blocks for."""
        ends = [table.end for table in sequence.tables]
        return min(ends) * self.block_size if ends else sequence.request.max_known

    def grow(self, sequence: Sequence, num_tokens: int, num_spare: int = 0) -> list[Grant] | None:
        """Grant a running sequence blocks for `num_tokens`; None, and no blocks, if a group has too few free.

        Blocks outside a window are released first. `num_spare` free blocks are left.
        """
        end = -(-num_tokens // self.block_size)
        for paged, table in zip(self.paged, sequence.tables, strict=True):
            num_out = paged.first_visible(sequence.num_computed) - table.first
            if num_out > 0:
                paged.pool.release(table.blocks[:num_out])
                del table.blocks[:num_out]
                table.first += num_out
            if end - table.end > max(0, paged.pool.num_free - num_spare):
                return None
        grants = []
        for paged, table in zip(self.paged, sequence.tables, strict=True):
            if (first := table.end) < end:
                blocks = paged.pool.allocate(end - first)
                table.blocks += blocks
                grants.append(Grant(sequence.slot, paged.index, first, tuple(blocks)))
        sequence.capacity = self._capacity(sequence)
        return grants

    def save(self, sequence: Sequence, start: int, end: int) -> list[Snapshot]:
        """Allocate snapshots for the block boundaries that a row passes, unless they exist already."""
        first, last = start // self.block_size + 1, end // self.block_size
        if first > last or not (self.retains or sequence.request.followers):
            return []  # without a prefix cache only followers can use them
        saved = []
        border = (sequence.num_prompt - 1) // self.block_size
        for states in self.states:
            numbers = {*range(-(-first // states.every) * states.every, last + 1, states.every)}
            if first <= border <= last:
                numbers.add(border)
            for number in sorted(numbers):
                known = (
                    number <= len(sequence.chain) and states.pool.find(sequence.chain[number - 1]) is not None
                )
                if not known and states.pool.num_free:
                    (snapshot,) = states.pool.allocate(1)
                    position = number * self.block_size
                    sequence.saving.append((position, states.pool, snapshot))
                    saved.append(Snapshot(sequence.slot, states.index, position, snapshot))
        return saved

    def register(self, sequence: Sequence) -> None:
        """Register the blocks that were filled and computed since the last call."""
        first, last = sequence.num_registered, sequence.num_computed // self.block_size
        for index in range(first, last):
            block_hash = sequence.block_hash(index, self.block_size)
            for paged, table in zip(self.paged, sequence.tables, strict=True):
                paged.pool.register(table.blocks[index - table.first], block_hash)
        sequence.num_registered = last

    def keep(self, sequence: Sequence, end: int) -> None:
        """Register the snapshots that a row up to `end` saved, as far as its tokens were accepted."""
        saving, sequence.saving = sequence.saving, []
        for position, pool, snapshot in saving:
            if position > end:
                sequence.saving.append((position, pool, snapshot))
                continue
            if position <= sequence.num_computed:
                pool.register(snapshot, sequence.block_hash(position // self.block_size - 1, self.block_size))
            pool.release([snapshot])

    def release(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds."""
        for paged, table in zip(self.paged, sequence.tables, strict=True):
            paged.pool.release(table.blocks)
        for _, pool, snapshot in sequence.saving:
            pool.release([snapshot])
        sequence.tables, sequence.saving, sequence.capacity = [], [], 0

    def check(self, running: Iterable[Sequence], num_steps: int) -> None:
        """Raise AssertionError unless pools and running sequences agree, and each holds what it needs.

        At most `num_steps` are in flight: no sequence holds more blocks than these can see.
        """
        running = list(running)
        for number, paged in enumerate(self.paged):
            paged.pool.check([sequence.tables[number].blocks for sequence in running])
        for states in self.states:
            held = [
                [entry] for sequence in running for _, pool, entry in sequence.saving if pool is states.pool
            ]
            states.pool.check(held)
        for sequence in running:
            assert sequence.num_registered == sequence.num_computed // self.block_size
            assert sequence.num_planned <= sequence.capacity == self._capacity(sequence)
            for paged, table in zip(self.paged, sequence.tables, strict=True):
                assert table.first <= paged.first_visible(sequence.num_computed)
                longest, batched = sequence.request.max_known, num_steps * self._num_batched_tokens
                most = paged.group.num_held(longest, self.block_size, batched)
                assert len(table.blocks) <= most + (paged.group.window is not None), "it holds too much"
