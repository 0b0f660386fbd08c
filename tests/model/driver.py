"""Sequences on a backend by real Steps: what a scheduler would plan, in the hands of a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.backend import Backend
from quire.program import Program
from quire.sampling_params import SamplingParams
from quire.types import Admission, Grant, ImageSlice, Row, RowResult, Snapshot, Step

# Every log-probability of every position: equal results have equal bits.
ALL = SamplingParams(temperature=0, seed=0, logprobs=-1, prompt_logprobs=-1)


@dataclass
class DrivenSequence:
    """A sequence that owns a slot."""

    admission: Admission
    tokens: list[int]
    computed: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)  # by group
    granted: int = 0  # blocks of each group that the device knows of
    fresh: bool = True
    began: int = 0  # where its first row did
    results: list[RowResult] = field(default_factory=list)

    @property
    def slot(self) -> int:
        return self.admission.slot

    def scores(self) -> dict[int, Any]:
        """The log-probabilities of every position that was predicted, by position."""
        found: dict[int, Any] = {}
        at = self.began + 1
        for result in self.results:
            for entry in (*result.prompt_logprobs, *result.logprobs):
                found[at] = entry
                at += 1
        return found


class Driver:
    """Hands out blocks in a random order, other ones in each cache group."""

    def __init__(self, program: Program, backend: Backend, num_blocks: int = 64, ahead: int = 0) -> None:
        self.backend, self.block_size = backend, 16
        self.free = [np.random.default_rng(g).permutation(num_blocks).tolist() for g in range(9)]
        self.groups = [i for i, spec in enumerate(program.cache_groups) if spec.token_bytes(1)]
        self.ahead = ahead  # positions that sequences have room for beyond those of their rows
        self.index = 0
        self.admitted: list[Admission] = []
        self.released: list[int] = []

    def admit(
        self,
        slot: int,
        tokens: list[int],
        params: SamplingParams = ALL,
        start: int = 0,
        shared: DrivenSequence | None = None,
        ends: tuple[int, ...] = (),
        **more: Any,
    ) -> DrivenSequence:
        """A sequence that begins with its next row at `start`; `shared` has the blocks before."""
        admission = Admission(slot, f"r{slot}", 0, params, ends, len(tokens), **more)
        self.admitted.append(admission)
        sequence = DrivenSequence(
            admission, list(tokens), start, {group: [] for group in self.groups}, began=start
        )
        if shared is not None:
            for group, blocks in sequence.blocks.items():
                blocks += shared.blocks[group][: start // self.block_size]
        return sequence

    def release(self, sequence: DrivenSequence) -> None:
        self.released.append(sequence.slot)

    def step(
        self,
        *rows: tuple[DrivenSequence, int] | tuple[DrivenSequence, int, tuple[int, ...]],
        restored: tuple[Snapshot, ...] = (),
        saved: tuple[Snapshot, ...] = (),
        num_proposed: int = 0,
        image_slice: ImageSlice | None = None,
    ) -> tuple[RowResult, ...]:
        """Compute `count` known tokens, and those drafted, of each sequence."""
        planned, granted = [], []
        for sequence, count, *rest in rows:
            drafted = rest[0] if rest else ()
            planned.append(self._row(sequence, count, drafted))
            granted += self._grants(sequence, sequence.computed + count + len(drafted))
        admitted, self.admitted = tuple(self.admitted), []
        released, self.released = tuple(self.released), []
        changes = admitted, tuple(granted), released, restored, saved
        step = Step(self.index, tuple(planned), *changes, num_proposed, image_slice)
        self.index += 1
        result = self.backend.launch(step).result()
        for row, got, (sequence, *_) in zip(planned, result.rows, rows, strict=True):
            sequence.results.append(got)
            sequence.tokens += got.token_ids
            sequence.computed = row.start + row.count - len(row.drafted) + max(0, len(got.token_ids) - 1)
        return result.rows

    def _row(self, sequence: DrivenSequence, count: int, drafted: tuple[int, ...]) -> Row:
        end = sequence.computed + count
        sample = end == len(sequence.tokens)
        prompt_left = sequence.computed < sequence.admission.num_prompt_tokens
        scored = prompt_left and sequence.admission.params.prompt_logprobs is not None
        num_logits = count + len(drafted) if scored else (1 + len(drafted)) * sample
        known = tuple(sequence.tokens) if sequence.fresh else ()
        sequence.fresh = False
        return Row(sequence.slot, sequence.computed, count + len(drafted), known, sample, num_logits, drafted)

    def _grants(self, sequence: DrivenSequence, num_tokens: int) -> list[Grant]:
        """Blocks for so many tokens; also those that are shared, when the sequence is new."""
        first, wanted = sequence.granted, -(-(num_tokens + self.ahead) // self.block_size)
        granted = []
        for group, blocks in sequence.blocks.items():
            blocks += [self.free[group].pop() for _ in range(wanted - len(blocks))]
            if len(blocks) > first:
                granted.append(Grant(sequence.slot, group, first, tuple(blocks[first:])))
        sequence.granted = max(first, wanted)
        return granted
