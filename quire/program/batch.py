"""Batch: one step as arrays, laid out for the ops. A backend makes it from a Step and its slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from quire.types import Admission, Snapshot

Ints = np.ndarray[Any, Any]  # int64


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, one row after the other.

    Positions `context_lens[r]` and beyond of a row are not in the cache, whatever its blocks hold. There is a
    block table for each cache group. Its entries of blocks that the row does not have, or that no token of it
    sees anymore, may be anything.
    `variants[r]` selects the row's rope frequencies (see quire.program.rope). `admissions[r]` has what else
    the ops of a program may want to know of a row: its adapter, its embeddings, how to pool it.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    row_offsets: Ints  # [R + 1], the tokens of row r are row_offsets[r] : row_offsets[r + 1]
    block_tables: tuple[Ints, ...]  # by cache group, each [R, blocks]
    context_lens: Ints  # [R], tokens in the cache after this step
    slots: Ints  # [R]
    variants: Ints  # [R]
    logit_rows: Ints  # [L], the tokens whose logits are wanted
    block_size: int
    admissions: tuple[Admission, ...] = ()  # [R]
    restored: tuple[Snapshot, ...] = ()  # states that slots take before their rows begin
    saved: tuple[Snapshot, ...] = ()  # and those to be kept as rows pass their positions
    memo: dict[Any, Any] = field(default_factory=dict)  # what several ops of this step share

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def token_rows(self) -> Ints:
        """The row of every token, [T]."""
        return np.repeat(np.arange(len(self.context_lens)), np.diff(self.row_offsets))

    def places(self, group: int) -> tuple[Ints, Ints]:
        """(block id, offset in the block) where each token goes in the caches of a group, [T] each."""
        place = self.memo.get(("places", group))
        if place is None:
            block = self.block_tables[group][self.token_rows, self.positions // self.block_size]
            place = self.memo["places", group] = block, self.positions % self.block_size
        return place
