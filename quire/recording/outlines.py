"""Requests and results made from a redacted recording, for a device that computes nothing.

Which blocks are found in the cache depends on whether their tokens are equal, which their HMACs tell: the
last token of a full block stands for its HMAC, all others are 0. So equal prefixes remain equal, and others
different.
"""

from __future__ import annotations

from quire.engine.epoch_state import EpochRequest
from quire.recording.entries import Blocks, Committed, CommittedOutline, Outline, OutlinedRequest
from quire.sampling_params import SamplingParams
from quire.types import Failure, NewRequest, PromptImage, Row, RowResult, Step, StepResult

END = (1 << 32) - 1  # the token that ends a sequence
MAX_SEQUENCES = 1 << 10


class Contents:
    """Invents the contents of a redacted recording. `max_tokens` bounds the lengths that it may state."""

    def __init__(self, block_size: int, max_tokens: int) -> None:
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._token_of: dict[bytes, int] = {}  # by HMAC
        self._slots: dict[int, tuple[int, bool]] = {}  # by slot: prompt tokens to score, pooling

    def request(self, outline: Outline) -> NewRequest:
        """Return a request with this outline. Raises ValueError for one that is not possible."""
        resumed = [
            None if one is None else self._emitted_before(outline, one.num_tokens, one.blocks)
            for one in outline.resumed
        ]
        return NewRequest(
            request_id=str(outline.request),
            prompt_token_ids=self._tokens(outline.num_tokens, outline.blocks),
            params=SamplingParams(
                n=min(outline.num_sequences, MAX_SEQUENCES),
                max_tokens=outline.max_tokens,
                prompt_logprobs=0 if outline.prompt_logprobs else None,
            ),
            arrival_s=outline.arrival_s,
            tenant=outline.tenant,
            priority=outline.priority,
            eos_token_ids=(END,),
            grammar="redacted" if outline.grammar else "",
            pooling="redacted" if outline.pooling else "",
            resumed=tuple(resumed),
            images=tuple(
                PromptImage(first, 1, end - first, 0, 0, b"", whole, work)
                for first, end, whole, work in outline.images
            ),
            block_keys=tuple((one.first, b"redacted") for one in outline.images),
        )

    def open_request(self, opened: OutlinedRequest) -> EpochRequest:
        """Return a request that is open at the beginning of an epoch. Raises ValueError."""
        new = self.request(opened.outline)
        sequences = [
            sequence._replace(emitted=self._emitted_before(opened.outline, num_emitted, blocks))
            for sequence, num_emitted, blocks in opened.sequences
        ]
        return EpochRequest(new, tuple(sequences), opened.owes_prompt_logprobs)

    def _emitted_before(self, outline: Outline, num_emitted: int, blocks: Blocks) -> tuple[int, ...]:
        """Return emitted tokens, given the blocks after the full ones of the prompt."""
        known = self._tokens(outline.num_tokens + num_emitted, outline.blocks + blocks)
        return known[outline.num_tokens :]

    def _tokens(self, count: int, blocks: Blocks) -> tuple[int, ...]:
        size = self._block_size
        if not 0 <= count <= self._max_tokens or len(blocks) != count // size:
            raise ValueError("a length is too large, or there is not one HMAC for each full block")
        tokens = [0] * count
        for index, block in enumerate(blocks, 1):
            tokens[index * size - 1] = self._token(block)
        return tuple(tokens)

    def _token(self, block: bytes) -> int:
        return self._token_of.setdefault(block, len(self._token_of) + 1)

    def take(self, step: Step) -> None:
        """Process the admissions of a step, before its results are asked for."""
        for admission in step.admitted:
            scored = admission.params.prompt_logprobs is not None
            num_scored = admission.num_prompt_tokens - 1 if scored else 0
            self._slots[admission.slot] = num_scored, bool(admission.pooling)

    def result(self, step: Step, entry: CommittedOutline) -> StepResult:
        """Return the results of a step, in the shape of real ones. Raises ValueError."""
        completed = dict(entry.blocks)
        rows = []
        for index, row in enumerate(step.rows):
            num_tokens = entry.num_tokens[index] if entry.num_tokens else 1
            gives = row.sample and index not in entry.failed
            token_ids = self._emitted(row, num_tokens, completed.get(index, ())) if gives else ()
            if index in entry.stopped:
                token_ids = (*token_ids[:-1], END)
            rows.append(self._row_result(row, token_ids, index in entry.failed))
        return StepResult(tuple(rows), *entry.times)

    def recorded_result(self, step: Step, entry: Committed) -> StepResult:
        """Return the recorded results of a step, without log-probabilities. Raises ValueError."""
        given = zip(step.rows, entry.token_ids, strict=True)
        rows = [self._row_result(row, ids, index in entry.failed) for index, (row, ids) in enumerate(given)]
        return StepResult(tuple(rows), *entry.times)

    def _row_result(self, row: Row, token_ids: tuple[int, ...], failed: bool) -> RowResult:
        if failed:
            return RowResult(error=Failure("it failed when it was recorded"))
        num_scored, pooling = self._slots[row.slot]
        scored = min(row.start + row.count, num_scored) - row.start
        return RowResult(token_ids, (), ((),) * scored, vector=(0.0,) if pooling else ())

    def _emitted(self, row: Row, count: int, blocks: Blocks) -> tuple[int, ...]:
        """Return the tokens that a row gives: those that complete a block stand for its HMAC."""
        if not 0 < count <= 1 + len(row.drafted):
            raise ValueError("a row gave no token, or too many")
        first = row.start + row.count - len(row.drafted)
        left = iter(blocks)
        ends = [(position + 1) % self._block_size == 0 for position in range(first, first + count)]
        return tuple([self._token(next(left, b"")) if end else 0 for end in ends])
