"""Batch: one step as arrays for the ops. A backend builds it from a Step and its slots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from quire.types import Admission, Snapshot

Ints = np.ndarray[Any, Any]  # int64


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, one row after the other.

    Positions of a row from `context_lens[r]` on are not in the cache, whatever its blocks hold. There is one
    block table per cache group. Its entries for blocks that the row does not have, or that are outside the
    window of all its tokens, are arbitrary. `variants[r]` selects the row's rope frequencies (see
    quire.program.rope). `admissions[r]` has whatever else ops may need of a row: its adapter, its embeddings,
    its pooling method.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    row_offsets: Ints  # [R + 1], the tokens of row r are row_offsets[r] : row_offsets[r + 1]
    block_tables: tuple[Ints, ...]  # by cache group, each [R, blocks]
    context_lens: Ints  # [R], tokens in the cache after this step
    slots: Ints  # [R]
    variants: Ints  # [R]
    logit_rows: Ints  # [L], the tokens that need logits
    block_size: int
    admissions: tuple[Admission, ...] = ()  # [R]
    restored: tuple[Snapshot, ...] = ()  # states loaded into slots before their rows begin
    saved: tuple[Snapshot, ...] = ()  # states saved as rows pass their positions
    hidden: np.ndarray | None = None  # [T, width], of the position before each token, for a prediction layer
    patches: np.ndarray | None = None  # [T, columns], the tokens of a vision tower
    windows: Ints | None = None  # [W + 1], offsets of windows of these, as row_offsets: what some layers see
    image_tokens: Ints | None = None  # [n], the tokens of images, in order
    image_embeddings: np.ndarray | None = None  # [n, width], what their tower gave for these
    image_addresses: Ints | None = None  # [ranks, n], where each accelerator has these instead
    visible_ends: Ints | None = None  # [T], of what tokens see, if some see positions after their own
    rotary_positions: Ints | None = None  # [T, 3], of models that rotate by three positions
    memo: dict[Any, Any] = field(default_factory=dict)  # shared by several ops of this step

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def token_rows(self) -> Ints:
        """Return the row of every token, [T]."""
        return np.repeat(np.arange(len(self.context_lens)), np.diff(self.row_offsets))

    @cached_property
    def by_window(self) -> Batch:
        """Return a batch of the same tokens whose rows are the windows. Raises ValueError if it has none."""
        if self.windows is None:
            raise ValueError("this batch brings no windows")
        counts = np.diff(self.windows)
        return replace(
            self,
            positions=np.arange(self.num_tokens) - np.repeat(self.windows[:-1], counts),
            row_offsets=self.windows,
            context_lens=counts,
            memo={},
        )

    def by_adapter(self, logits: bool) -> dict[str, Ints]:
        """Return the tokens of each adapter; with `logits`, the logit rows of each."""
        found: dict[str, Ints] | None = self.memo.get(("adapters", logits))
        if found is None:
            rows = self.token_rows[self.logit_rows] if logits else self.token_rows
            names = [admission.adapter for admission in self.admissions]
            found = {}
            for name in dict.fromkeys(name for name in names if name):
                own = np.array([number for number, other in enumerate(names) if other == name])
                found[name] = np.flatnonzero(np.isin(rows, own))
            self.memo["adapters", logits] = found
        return found

    def places(self, group: int) -> tuple[Ints, Ints]:
        """Return (block id, offset in the block) of each token in the caches of a group, [T] each."""
        place = self.memo.get(("places", group))
        if place is None:
            block = self.block_tables[group][self.token_rows, self.positions // self.block_size]
            place = self.memo["places", group] = block, self.positions % self.block_size
        return place

    def entry_places(self, group: int, every: int) -> tuple[Ints, tuple[Ints, Ints]]:
        """Return the tokens that end an entry of `every` tokens, [n], and (block id, offset) of these."""
        tokens = np.flatnonzero((self.positions + 1) % every == 0)
        blocks, offsets = self.places(group)
        return tokens, (blocks[tokens], offsets[tokens] % self.block_size // every)
