"""The budget of a step: how many tokens it may compute."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.request import Sequence


class Budget:
    """Bounds the tokens of a step: `max_num_batched_tokens`, and `max_num_prefill_tokens` of prompts.

    The second bound holds only while sequences generate: a chunk of a prompt delays their tokens.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_prefill_tokens: int | None = None) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_prefill_tokens = max_num_prefill_tokens or max_num_batched_tokens

    def num_tokens(self, running: Iterable[Sequence]) -> int:
        """Return the tokens that the next step may compute beside or for these running sequences."""
        generating = sum(c.num_ahead - c.num_planned == 1 for c in running)
        most = generating + self.max_num_prefill_tokens if generating else self.max_num_batched_tokens
        return min(most, self.max_num_batched_tokens)
