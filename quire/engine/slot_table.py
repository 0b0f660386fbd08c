"""The slots of a device, and the sequences that hold them."""

from __future__ import annotations

import heapq

from quire.engine.request import Sequence


class SlotTable:
    """Gives running sequences the lowest free slot, and keeps the slots released since the last step."""

    def __init__(self, num_slots: int) -> None:
        self.sequences: dict[int, Sequence] = {}  # by slot, in the order of admission
        self.num_constrained = 0  # sequences with a grammar
        self._num_slots = num_slots
        self._free = list(range(num_slots))  # a heap
        self._released: list[int] = []

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    @property
    def released(self) -> tuple[int, ...]:
        """The slots released since the last step."""
        return tuple(self._released)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a slot."""
        sequence.slot = heapq.heappop(self._free)
        self.sequences[sequence.slot] = sequence
        self.num_constrained += bool(sequence.request.new.grammar)

    def leave(self, sequence: Sequence) -> None:
        """Take the slot of a sequence."""
        slot, sequence.slot = sequence.slot, -1
        del self.sequences[slot]
        heapq.heappush(self._free, slot)
        self._released.append(slot)
        self.num_constrained -= bool(sequence.request.new.grammar)

    def take_released(self) -> list[int]:
        """Return the slots released since the last call."""
        released, self._released = self._released, []
        return released

    def check(self) -> None:
        """Raise AssertionError unless every slot is free or held by one sequence."""
        assert sorted([*self.sequences, *self._free]) == list(range(self._num_slots))
        assert all(sequence.slot == slot for slot, sequence in self.sequences.items())
        constrained = [c for c in self.sequences.values() if c.request.new.grammar]
        assert len(constrained) == self.num_constrained
