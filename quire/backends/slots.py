"""The slots of a backend whose memory is the host's: tokens, block tables and the state of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.backend import Masks
from quire.program.batch import Batch
from quire.sampling.arithmetic import NUMPY, Arithmetic
from quire.sampling.logprobs import LogitsError, prompt_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.types import Admission, Failure, PositionLogprobs, Row, RowResult, Step, StepResult


@dataclass(slots=True)
class Slot:
    """What a slot holds from admission to release: its tokens, its block table, the state of its sampling."""

    admission: Admission
    token_ids: list[int]
    sampler: SamplerState
    blocks: list[int] = field(default_factory=list)


class Slots:
    """Applies the deltas of steps, lays steps out as batches, and turns logits into results."""

    def __init__(self, vocab_size: int, block_size: int, arithmetic: Arithmetic = NUMPY) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._arithmetic = arithmetic
        self._slots: dict[int, Slot] = {}

    def batch(self, step: Step) -> Batch:
        """Take in what a step brings, and lay it out for the ops. Block tables are padded with block 0."""
        self._apply(step)
        rows = [(row, self._slots[row.slot]) for row in step.rows]
        counts = np.array([row.count for row, _ in rows])
        ends = np.array([row.start + row.count for row, _ in rows])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        tables = np.zeros((len(rows), max(len(slot.blocks) for _, slot in rows)), np.int64)
        for table, (_, slot) in zip(tables, rows, strict=True):
            table[: len(slot.blocks)] = slot.blocks
        tokens = [slot.token_ids[row.start : row.start + row.count] for row, slot in rows]
        lasts = [
            np.arange(end - row.num_logits, end) for end, row in zip(offsets[1:], step.rows, strict=True)
        ]
        return Batch(
            token_ids=np.concatenate(tokens),
            positions=np.arange(offsets[-1]) + np.repeat(ends - counts - offsets[:-1], counts),
            row_offsets=offsets,
            block_tables=tables,
            context_lens=ends,
            variants=np.array([slot.admission.context_variant for _, slot in rows]),
            logit_rows=np.concatenate(lasts),
            block_size=self._block_size,
        )

    def _apply(self, step: Step) -> None:
        for number in step.released:
            del self._slots[number]
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            token_ids = list(brought[admission.slot])
            sampler = SamplerState(admission, token_ids, self._vocab_size)
            self._slots[admission.slot] = Slot(admission, token_ids, sampler)
        for grant in step.granted:
            self._slots[grant.slot].blocks[grant.first :] = grant.block_ids

    def finish(self, step: Step, logits: np.ndarray, masks: Masks | None) -> StepResult:
        """Turn logits [L, vocab] into results, and note the sampled tokens in the slots."""
        found: Mapping[int, Any | Failure] = {} if masks is None else masks()
        results, first = [], 0
        for index, row in enumerate(step.rows):
            own = logits[first : first + row.num_logits]
            results.append(self._finish(row, self._slots[row.slot], own, found.get(index)))
            first += row.num_logits
        return StepResult(tuple(results))

    def _finish(self, row: Row, slot: Slot, logits: np.ndarray, mask: Any | Failure | None) -> RowResult:
        try:
            scored = self._score_prompt(row, slot, logits)
        except LogitsError as error:
            return RowResult(error=error.failure)
        if not row.sample:
            return RowResult(prompt_logprobs=scored)
        if isinstance(mask, Failure):
            return RowResult(error=mask)
        result = sample(logits[-1], slot.sampler, self._arithmetic, mask)
        slot.token_ids += result.token_ids
        slot.sampler.extend(result.token_ids)
        return RowResult(result.token_ids, result.logprobs, scored, result.error)

    def _score_prompt(self, row: Row, slot: Slot, logits: np.ndarray) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of the prompt's tokens at the positions that this row's logits predict."""
        wanted = slot.admission.params.prompt_logprobs
        first, last = row.start + row.count - row.num_logits + 1, slot.admission.num_prompt_tokens
        following = slot.token_ids[first : min(row.start + row.count + 1, last)]
        if wanted is None or not following:
            return ()
        return prompt_logprobs(logits[: len(following)], following, wanted, self._arithmetic)


@dataclass(slots=True)
class Deferred:
    """A step that computes when it is collected."""

    compute: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self.compute()
