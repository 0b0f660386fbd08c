"""Counts of what passed over a link, for the server of a decode engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LinkCounts:
    """Prompts that were sent over a link by what became of them, and what it took, since the start."""

    num_computed: int = 0  # by the prefill engine
    num_lost: int = 0  # computed here after all, as the link ended
    num_refused: int = 0  # computed here after all, as the prefill engine would or could not
    num_block_bytes: int = 0  # of blocks that came
    prompt_s: float = 0.0  # from the request to its first tokens
    block_s: float = 0.0  # from the first tokens to the last block
