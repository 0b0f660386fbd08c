"""Runner: Step in, StepResult out. Keeps what the device knows of each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from quire.backends.backend import Backend
from quire.program.batch import Batch
from quire.runner.masks import Grammars, GrammarState, Masks
from quire.sampling.arithmetic import NUMPY, Arithmetic
from quire.sampling.logprobs import LogitsError, prompt_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.types import Admission, Failure, PositionLogprobs, Row, RowResult, Step, StepResult


@dataclass(slots=True)
class Slot:
    """What a slot holds from admission to release: its tokens, its blocks, the state of its sampling."""

    admission: Admission
    token_ids: list[int]
    sampler: SamplerState
    grammar: GrammarState | None = None
    blocks: list[int] = field(default_factory=list)

    def wanted_logits(self, row: Row) -> int:
        """How many of the row's last positions need logits: the sampled one, or all inside the prompt."""
        if self.scores_prompt(row):
            return row.count
        return int(row.sample)

    def scores_prompt(self, row: Row) -> bool:
        """True when the row's logits say how likely prompt tokens were, and that was asked for."""
        last = self.admission.num_prompt_tokens - 1
        return self.admission.params.prompt_logprobs is not None and row.start < last


class Runner:
    """Executes steps on a backend. Rows of the batch are the step's rows, in their order.

    `load_grammars` is called when the first grammar comes, or to prepare; without it there must be none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        block_size: int,
        arithmetic: Arithmetic = NUMPY,
        load_grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        self._backend = backend
        self._arithmetic = arithmetic
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._slots: dict[int, Slot] = {}
        self._masks = Masks(load_grammars) if load_grammars else None

    def prepare_grammars(self) -> None:
        """Make ready for grammars in the background: with a large vocabulary, half a second and 100 MB."""
        if self._masks is not None:
            self._masks.prepare()

    def execute(self, step: Step) -> StepResult:
        """Compute one step: logits from the backend, then a token for each row that samples."""
        self._apply(step)
        rows = [(row, self._slots[row.slot]) for row in step.rows]
        masks = self._begin_masks(rows)
        logits = self._backend.execute(self._batch(rows))
        for mask in masks:
            mask.result()
        results, first = [], 0
        for row, slot in rows:
            count = slot.wanted_logits(row)
            results.append(_finish(row, slot, logits[first : first + count], self._arithmetic))
            first += count
        return StepResult(tuple(results))

    def _begin_masks(self, rows: Sequence[tuple[Row, Slot]]) -> Sequence[Future[None]]:
        """Start what computes the masks of the rows that have a grammar; nothing when none has."""
        ruled = [
            (slot.grammar, slot.token_ids, slot.admission.eos_token_ids)
            for row, slot in rows
            if slot.grammar is not None and row.sample
        ]
        return self._masks.begin(ruled) if ruled and self._masks else ()

    def _apply(self, step: Step) -> None:
        for number in step.released:
            del self._slots[number]
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            token_ids = list(brought[admission.slot])
            sampler = SamplerState(admission, token_ids, self._vocab_size)
            grammar = GrammarState(admission) if admission.grammar else None
            self._slots[admission.slot] = Slot(admission, token_ids, sampler, grammar)
        for number, blocks in step.granted:
            self._slots[number].blocks += blocks

    def _batch(self, rows: Sequence[tuple[Row, Slot]]) -> Batch:
        """The step as arrays. Rows lie one after the other; block tables are padded with block 0."""
        counts = np.array([row.count for row, _ in rows])
        ends = np.array([row.start + row.count for row, _ in rows])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        tables = np.zeros((len(rows), max(len(slot.blocks) for _, slot in rows)), np.int64)
        for table, (_, slot) in zip(tables, rows, strict=True):
            table[: len(slot.blocks)] = slot.blocks
        tokens = [slot.token_ids[row.start : row.start + row.count] for row, slot in rows]
        wanted = [slot.wanted_logits(row) for row, slot in rows]
        lasts = [np.arange(end - n, end) for end, n in zip(offsets[1:], wanted, strict=True)]
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


def _finish(row: Row, slot: Slot, logits: np.ndarray, arithmetic: Arithmetic) -> RowResult:
    """Turn a row's logits [wanted, vocab] into its result, and note the sampled token in the slot."""
    try:
        scored = _score_prompt(row, slot, logits, arithmetic) if slot.scores_prompt(row) else ()
    except LogitsError as error:
        return RowResult(error=error.failure)
    if not row.sample:
        return RowResult(prompt_logprobs=scored)
    barred = None
    if slot.grammar is not None:
        barred = slot.grammar.barred
        if barred is None:
            return RowResult(error=slot.grammar.error or Failure("this engine has no grammars"))
    result = sample(logits[-1], slot.sampler, arithmetic, barred)
    slot.token_ids += result.token_ids
    slot.sampler.extend(result.token_ids)
    return RowResult(result.token_ids, result.logprobs, scored, result.error)


def _score_prompt(
    row: Row, slot: Slot, logits: np.ndarray, arithmetic: Arithmetic
) -> tuple[PositionLogprobs, ...]:
    """Log-probabilities of the prompt tokens at positions start + 1 ... that this row's logits predict."""
    end = min(row.start + row.count + 1, slot.admission.num_prompt_tokens)
    following = slot.token_ids[row.start + 1 : end]
    wanted = slot.admission.params.prompt_logprobs or 0
    return prompt_logprobs(logits[: len(following)], following, wanted, arithmetic)
