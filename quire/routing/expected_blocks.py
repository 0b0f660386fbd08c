"""Blocks that replicas will have: those of the prompts that they were sent and have not begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_EXPECTED = 100_000  # blocks that a router expects


class ExpectedBlocks:
    """Which replicas will have which blocks, by key, as bits of an integer; at most `most` blocks.

    Of two requests that share blocks, the first that begins takes both away: the replica reports them then.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, replica: int, keys: Iterable[int]) -> None:
        """Note that a replica will have these blocks. What does not fit is left out."""
        masks, flag = self._masks, 1 << replica
        for key in keys:
            if len(masks) < self._most or key in masks:
                masks[key] = masks.get(key, 0) | flag

    def remove(self, replica: int, keys: Iterable[int]) -> None:
        """Note that these blocks are expected of a replica no longer."""
        masks, flag = self._masks, 1 << replica
        for key in keys:
            if (mask := masks.get(key)) is not None:
                if rest := mask & ~flag:
                    masks[key] = rest
                else:
                    del masks[key]

    def remove_replica(self, replica: int) -> None:
        """Forget what is expected of a replica."""
        self.remove(replica, [*self._masks])

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many leading blocks of a chain replicas will have, if any."""
        found: dict[int, int] = {}
        masks, having = self._masks, -1
        for number, key in enumerate(keys):
            held = having & masks.get(key, 0)
            if held != having and number:
                _put(found, having & ~held, number)
            having = held
            if not having:
                return found
        if keys:
            _put(found, having, len(keys))
        return found


def _put(found: dict[int, int], mask: int, number: int) -> None:
    """Set the number of each replica in a mask."""
    while mask:
        found[mask.bit_length() - 1] = number
        mask ^= 1 << (mask.bit_length() - 1)
