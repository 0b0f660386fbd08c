"""The caches as the scheduler sees them: what a choice needs of the pool, and what it finds there."""

from __future__ import annotations

from quire.engine.blocks import BlockPool
from quire.engine.request import Choice


class Caches:
    """The pool of blocks, and what choices find in it."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def has_room(self, choice: Choice, num_spare: int) -> bool:
        """Whether the blocks that a choice wants are free, and spare ones for those that run."""
        return choice.num_blocks_wanted + num_spare <= self.pool.num_free

    def may_want_less(self, choice: Choice) -> bool:
        """Whether the blocks of its prefix became more, or came into use, since the last attempt."""
        if choice.num_revived != self.pool.num_revived:
            return True
        index = choice.num_matched  # of the first block that was not found
        if index >= choice.num_reusable() // self.block_size:
            return False
        return self.pool.find(choice.block_hash(index, self.block_size)) is not None

    def match(self, choice: Choice) -> list[int]:
        """Return the blocks that hold the longest cached beginning of the choice's tokens."""
        shared: list[int] = []
        for index in range(choice.num_reusable() // self.block_size):
            block = self.pool.find(choice.block_hash(index, self.block_size))
            if block is None:
                break
            shared.append(block)
        num_fresh = self.num_blocks_for(choice.num_known) - len(shared)
        choice.num_blocks_wanted = num_fresh + self.pool.num_idle(shared)
        choice.num_matched, choice.num_revived = len(shared), self.pool.num_revived
        return shared

    def register(self, choice: Choice) -> None:
        """Make the blocks findable that were filled and computed since the last time."""
        first, last = choice.num_registered, choice.num_computed // self.block_size
        for index in range(first, last):
            self.pool.register(choice.blocks[index], choice.block_hash(index, self.block_size))
        choice.num_registered = last
