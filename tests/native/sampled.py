"""Rows for the native core to sample, and what the definition gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.sampling import row_results, slot_params
from quire.sampling.faults import LogitsError
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission, RowResult

EOS = 3


def admit(sampler: _core.Sampler, admission: Admission, token_ids: Sequence[int]) -> None:
    sampler.admit(admission.slot, slot_params(admission, sampler.vocab_size), token_ids)


@dataclass
class Case:
    """A row as a step has it: what was asked, all known tokens, logits, and what else came."""

    params: SamplingParams
    prompt: Sequence[int]
    emitted: Sequence[int]
    logits: np.ndarray  # of the scored positions, then of the sampled ones
    sequence: int = 0
    following: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    masks: list[np.ndarray | None] | None = None
    samples: bool = True
    length: int | None = None  # of the prompt, where its tokens do not matter

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def admission(self, slot: int) -> Admission:
        length = len(self.prompt) if self.length is None else self.length
        return Admission(slot, "r", self.sequence, self.params, (EOS, 10**6), length)

    def state(self) -> SamplerState:
        return SamplerState(self.admission(0), (*self.prompt, *self.emitted), self.vocab_size)


def expected(case: Case) -> RowResult:
    """By the definition, token by token: a drafted one counts where it is the row's own."""
    state, first = case.state(), len(case.following)
    try:
        scored = prompt_logprobs(case.logits[:first], case.following, case.params.prompt_logprobs or 0)
    except LogitsError as error:
        return RowResult(error=error.failure)
    tokens, listed = (), ()
    for i in range(len(case.drafted) + 1 if case.samples else 0):
        one = sample(case.logits[first + i], state, mask=case.masks[i] if case.masks else None)
        if one.error:
            return RowResult(tokens, listed, scored, None if tokens else one.error)
        tokens, listed = tokens + one.token_ids, listed + one.logprobs
        state.extend(one.token_ids)
        if i < len(case.drafted) and one.token_ids[0] != case.drafted[i]:
            break
    return RowResult(tokens, listed, scored)


def run(sampler: _core.Sampler, cases: list[Case], slots: list[int] | None = None) -> tuple[RowResult, ...]:
    """All cases as the rows of one step, in fresh slots."""
    slots = slots or list(range(len(cases)))
    rows, first = [], 0
    for slot, case in zip(slots, cases, strict=True):
        admit(sampler, case.admission(slot), (*case.prompt, *case.emitted))
        sampled = first + len(case.following) if case.samples else -1
        rows.append((slot, first, case.following, sampled, case.drafted, case.masks))
        first += len(case.logits)
    results = row_results(sampler.sample(np.concatenate([case.logits for case in cases]), rows))
    for slot in slots:
        sampler.release(slot)
    return results


def assert_same(got: RowResult, wanted: RowResult, what: Any = None) -> None:
    """Log-probabilities may differ in the last bit: their sums are off by up to 2e-14, in either."""
    assert (got.token_ids, got.error) == (wanted.token_ids, wanted.error), what
    for mine, theirs in ((got.logprobs, wanted.logprobs), (got.prompt_logprobs, wanted.prompt_logprobs)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert [(e.token_id, e.rank) for e in one] == [(e.token_id, e.rank) for e in other], what
            values = [e.logprob for e in one], [e.logprob for e in other]
            np.testing.assert_allclose(*values, rtol=2.4e-7, atol=1e-13)
