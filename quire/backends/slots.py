"""The slots of a backend in host memory: tokens, block tables and sampling state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.backends.backend import GetMasks
from quire.backends.drafting import Known, ModelDrafts
from quire.backends.slot_images import SeenTokens, SlotImages
from quire.program.batch import Batch
from quire.sampling.faults import LogitsError
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.types import Admission, Failure, PositionLogprobs, Row, RowResult, Step, StepResult


@dataclass(slots=True)
class Slot:
    """A slot from admission to release: its tokens and, unless it is for pooling, its sampling state."""

    admission: Admission
    token_ids: list[int]
    sampler: SamplerState | None
    num_blocks: int = 0  # length of its block tables


class Slots:
    """Applies the deltas of steps, lays steps out as batches, and turns logits into results.

    Each slot has `num_tables` block tables, one per cache group. `drafting` proposes tokens, and
    `images` embeds those of prompts, if given.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        num_tables: int,
        drafting: ModelDrafts[SamplerState] | None = None,
        images: SlotImages[np.ndarray] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._slots: dict[int, Slot] = {}
        self._tables = [np.zeros((0, 0), np.int64)] * num_tables  # by group: [slots, blocks]
        self._drafting = drafting
        self._images = images

    def batch(self, step: Step) -> Batch:
        """Apply the deltas of a step, and lay it out for the ops."""
        self._apply(step)
        rows = [(row, self._slots[row.slot]) for row in step.rows]
        counts = np.array([row.count for row, _ in rows])
        ends = np.array([row.start + row.count for row, _ in rows])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        numbers = np.array([row.slot for row in step.rows])
        longest = max(slot.num_blocks for _, slot in rows)
        tokens = [_tokens(row, slot) for row, slot in rows]
        lasts = [
            np.arange(end - row.num_logits, end) for end, row in zip(offsets[1:], step.rows, strict=True)
        ]
        ends_seen, seen = None, list[SeenTokens[np.ndarray]]()
        if self._images is not None:
            ends_seen = self._images.visible_ends(step.rows)
            seen = self._images.seen(step.rows, offsets)
        return Batch(
            token_ids=np.concatenate(tokens),
            positions=np.arange(offsets[-1]) + np.repeat(ends - counts - offsets[:-1], counts),
            row_offsets=offsets,
            block_tables=tuple(table[numbers, :longest] for table in self._tables),
            context_lens=ends,
            slots=numbers,
            variants=np.array([slot.admission.context_variant for _, slot in rows]),
            logit_rows=np.concatenate(lasts),
            block_size=self._block_size,
            admissions=tuple(slot.admission for _, slot in rows),
            restored=step.restored,
            saved=step.saved,
            image_tokens=np.concatenate([one.tokens for one in seen]) if seen else None,
            image_embeddings=np.concatenate([one.embeddings[one.rows] for one in seen]) if seen else None,
            visible_ends=ends_seen,
            rotary_positions=None if self._images is None else self._images.positions(step.rows),
        )

    def _apply(self, step: Step) -> None:
        for number in step.released:
            del self._slots[number]
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            token_ids = list(brought[admission.slot])
            pooled = bool(admission.pooling)
            sampler = None if pooled else SamplerState(admission, token_ids, self._vocab_size)
            self._slots[admission.slot] = Slot(admission, token_ids, sampler)
            for group in range(len(self._tables)):
                self._table(group, admission.slot, 0)
        for grant in step.granted:
            end = grant.first + len(grant.block_ids)
            self._table(grant.group, grant.slot, end)[grant.first : end] = grant.block_ids
            slot = self._slots[grant.slot]
            slot.num_blocks = max(slot.num_blocks, end)
        if self._drafting is not None:
            self._drafting.apply(step)
        if self._images is not None:
            self._images.apply(step)

    def _table(self, group: int, slot: int, num_blocks: int) -> np.ndarray:
        """Return the block table of a slot, with space for `num_blocks`; ids already in it are kept."""
        held = self._tables[group]
        slots, blocks = held.shape
        if slot >= slots or num_blocks > blocks:
            shape = (2 * (slot + 1) if slot >= slots else slots, max(blocks, 2 * num_blocks))
            self._tables[group] = np.zeros(shape, np.int64)
            self._tables[group][:slots, :blocks] = held
        return self._tables[group][slot]

    def replaced(self, group: int, block_ids: Sequence[int]) -> None:
        """Note that the contents of blocks were replaced: the draft model has nothing in them."""
        if self._drafting is not None and group == self._drafting.table.group:
            self._drafting.forget(block_ids)

    def run(self, step: Step, execute: Callable[[Batch], np.ndarray], masks: GetMasks | None) -> StepResult:
        """Compute a step in the calling thread; `execute` returns the logits [L, vocab] of a batch."""
        began_s, ran_s = time.monotonic(), time.thread_time()
        logits = execute(self.batch(step))
        ran_s, computed_s = time.thread_time() - ran_s, time.monotonic()
        found: Mapping[int, Sequence[Any] | Failure] = {} if masks is None else masks()
        masked_s = time.monotonic()
        rows = self._sample(step, logits, found)
        sampled_s, draft_s = time.monotonic(), 0.0
        if self._drafting is not None and step.num_proposed:
            rows, draft_s = self._propose(self._drafting, step, rows)
        return StepResult(
            rows,
            began_s=began_s,
            ended_s=sampled_s + draft_s,
            mask_s=masked_s - computed_s,
            sampling_s=sampled_s - masked_s,
            core_wait_s=max(0.0, computed_s - began_s - ran_s),
            draft_s=draft_s,
            image_s=self._images.encode_s if self._images is not None else 0.0,
        )

    def _propose(
        self, drafting: ModelDrafts[SamplerState], step: Step, results: tuple[RowResult, ...]
    ) -> tuple[tuple[RowResult, ...], float]:
        """Add what the draft model proposes to the results."""
        tables, known = self._tables[drafting.table.group], {}
        for row in step.rows:
            slot = self._slots[row.slot]
            if slot.sampler is not None:
                known[row.slot] = Known(slot.token_ids, slot.sampler, tables[row.slot])
        return drafting.propose(step, results, known)

    def _sample(
        self, step: Step, logits: np.ndarray, found: Mapping[int, Sequence[Any] | Failure]
    ) -> tuple[RowResult, ...]:
        """Turn logits [L, vocab] into results, and append the sampled tokens to the slots."""
        results, first = [], 0
        for index, row in enumerate(step.rows):
            own = logits[first : first + row.num_logits]
            slot = self._slots[row.slot]
            results.append(row_result(row, slot, own, found.get(index)))
            if row.sample and not results[-1].token_ids:
                slot.token_ids.append(0)  # any token: a next row in flight computes with it, and is dropped
            first += row.num_logits
        return tuple(results)


def row_result(row: Row, slot: Slot, logits: np.ndarray, masks: Sequence[Any] | Failure | None) -> RowResult:
    """Turn the logits of a row, [its logits, vocab], into its result, and append its tokens to the slot."""
    if slot.sampler is None:
        return _vector(logits[-1])
    try:
        scored = _score_prompt(row, slot, logits)
    except LogitsError as error:
        return RowResult(error=error.failure)
    if not row.sample:
        return RowResult(prompt_logprobs=scored)
    if isinstance(masks, Failure):
        return RowResult(error=masks)
    num_sampled = 1 + len(row.drafted)
    each = [None] * num_sampled if masks is None else masks
    result = _verify(row, slot.sampler, logits[-num_sampled:], each)
    slot.token_ids += result.token_ids
    return result._replace(prompt_logprobs=scored)


def _verify(row: Row, sampler: SamplerState, logits: np.ndarray, masks: Sequence[Any | None]) -> RowResult:
    """Sample tokens while they equal the drafted ones, at the positions that have masks.

    An error after an accepted token recurs as the first of the next row.
    """
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    for position, mask, drafted in zip(logits, masks, (*row.drafted, None), strict=False):
        result = sample(position, sampler, mask)
        if result.error is not None and not token_ids:
            return result
        token_ids, logprobs = token_ids + result.token_ids, logprobs + result.logprobs
        sampler.extend(result.token_ids)
        if result.token_ids != (drafted,):
            break
    return RowResult(token_ids, logprobs)


def _score_prompt(row: Row, slot: Slot, logits: np.ndarray) -> tuple[PositionLogprobs, ...]:
    """Return the log-probabilities of the prompt tokens that this row's logits predict."""
    wanted, following = slot.admission.params.prompt_logprobs, scored_tokens(row, slot)
    if wanted is None or not following:
        return ()
    return prompt_logprobs(logits[: len(following)], following, wanted)


def scored_tokens(row: Row, slot: Slot) -> list[int]:
    """Return the prompt tokens whose log-probabilities a row gives, from its first logits on."""
    if slot.admission.params.prompt_logprobs is None:
        return []
    first, last = row.start + row.count - row.num_logits + 1, slot.admission.num_prompt_tokens
    return slot.token_ids[first : min(row.start + row.count + 1, last)]


def _vector(found: np.ndarray) -> RowResult:
    """Return the pooled vector of a row."""
    if not np.isfinite(found).all():
        return RowResult(error=Failure("the model gave a vector with numbers that are not finite"))
    return RowResult(vector=tuple(found.reshape(-1).tolist()))


def _tokens(row: Row, slot: Slot) -> list[int]:
    """Return the tokens of a row: known ones, then drafted ones, which the slot does not have yet."""
    end = row.start + row.count - len(row.drafted)
    return [*slot.token_ids[row.start : end], *row.drafted]


@dataclass(slots=True)
class Deferred:
    """A step that computes when it is collected."""

    compute: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self.compute()
