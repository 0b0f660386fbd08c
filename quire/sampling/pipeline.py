"""The sampling pipeline of docs/sampling.md: from a row of logits to a token.

Each row is computed independently, so its bits cannot depend on other rows. The only state between draws are
counts of tokens, which are determined by the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from quire.sampling.faults import EXCLUDED, TOO_LARGE, LogitsError
from quire.sampling.kernels import Logits, draw
from quire.sampling.logprobs import greatest, position_logprobs
from quire.sampling.philox import uniform
from quire.types import Admission, RowResult

Mask = NDArray[np.uint32]  # a bit for each allowed token, the lowest first  # [ceil(V / 32)]

_MINUS_INF = np.float32(-np.inf)


class SamplerState:
    """Sampling state of the sequence in a slot.

    A pure function of the admission and the tokens: it is rebuilt identically from all known tokens after a
    preemption. Arrays of the size of the vocabulary exist only if a parameter needs them.

    The caller must have checked the token ids of `admission.params` with `check_vocabulary`, and replaced a
    seed of None.
    """

    __slots__ = (
        "allowed_ids",
        "bias_ids",
        "biases",
        "edits_logits",
        "num_prompt_tokens",
        "num_tokens",
        "output_counts",
        "params",
        "recent",
        "seed",
        "seen",
        "sequence",
        "stop_ids",
    )

    def __init__(self, admission: Admission, token_ids: Sequence[int], vocab_size: int) -> None:
        """Build from `token_ids`, all known tokens: the prompt, then those emitted before a preemption."""
        params = admission.params
        if params.seed is None:
            raise ValueError("SamplerState needs a seed: resolve None before admission")
        self.params = params
        self.seed = params.seed
        self.sequence = admission.sequence
        self.num_prompt_tokens = admission.num_prompt_tokens
        self.num_tokens = self.num_prompt_tokens
        self.recent: list[int] = []  # the last emitted tokens, up to the length of the longest bad word
        self._keep_token_arrays(admission.eos_token_ids, vocab_size)
        penalizes_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.output_counts = np.zeros(vocab_size, np.int32) if penalizes_output else None
        self.seen = np.zeros(vocab_size, np.bool_) if params.repetition_penalty != 1 else None
        if self.seen is not None:
            self.seen[np.array(token_ids[: self.num_prompt_tokens], np.intp)] = True
        constrains = self.allowed_ids is not None or self.bias_ids is not None or params.bad_words_token_ids
        self.edits_logits = bool(constrains or penalizes_output or self.seen is not None)
        self.extend(token_ids[self.num_prompt_tokens :])

    def _keep_token_arrays(self, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        params = self.params
        allowed = params.allowed_token_ids
        self.allowed_ids = None if allowed is None else np.array(allowed, np.intp)
        self.bias_ids = np.array(list(params.logit_bias), np.intp) if params.logit_bias else None
        self.biases = np.array(list(params.logit_bias.values()), np.float32)
        # The tokenizer may have an end token that the model cannot produce.
        stop_ids = {*params.stop_token_ids, *(i for i in eos_token_ids if i < vocab_size)}
        self.stop_ids = np.array(sorted(stop_ids), np.intp)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Record newly emitted tokens, in time proportional to their number."""
        self.num_tokens += len(token_ids)
        if self.seen is not None:
            self.seen[np.array(token_ids, np.intp)] = True
        if self.output_counts is not None:
            np.add.at(self.output_counts, np.array(token_ids, np.intp), 1)
        if self.params.bad_words_token_ids:
            longest = max(map(len, self.params.bad_words_token_ids))
            self.recent = [*self.recent, *token_ids][-longest:]

    def after(self, token_ids: Sequence[int]) -> SamplerState:
        """Return the state after these tokens, without changing this one."""
        state = copy(self)
        state.seen = None if self.seen is None else self.seen.copy()
        state.output_counts = None if self.output_counts is None else self.output_counts.copy()
        state.extend(token_ids)
        return state

    @property
    def suppresses_stop(self) -> bool:
        """True until `min_tokens` tokens have been emitted."""
        return self.num_tokens - self.num_prompt_tokens < self.params.min_tokens


def sample(logits: Logits, state: SamplerState, mask: Mask | None = None) -> RowResult:
    """Sample the token after those of `state`, without changing any argument.  # logits [V]

    `mask` has the tokens that the request's grammar allows here. The position of the random draw is the index
    of the new token in the sequence. Call `state.extend` with the token before sampling the next one. Invalid
    logits, and constraints that leave no token, give a RowResult with `error` set and no token.
    """
    params = state.params
    try:
        token_id = choose(logits, state, mask)
        if params.logprobs is None:
            return RowResult((token_id,))
        return RowResult((token_id,), (position_logprobs(logits, token_id, params.logprobs),))
    except LogitsError as error:
        return RowResult(error=error.failure)


def choose(logits: Logits, state: SamplerState, mask: Mask | None = None) -> int:
    """Return the token that `sample` would. Raises LogitsError if there is none.  # logits [V]"""
    params = state.params
    token_id, maximum = greatest(logits)
    edited = logits
    if state.edits_logits or state.suppresses_stop or mask is not None:
        edited = edit_logits(logits, state, mask)
        token_id, maximum = _greatest_edited(edited)
    if params.temperature == 0:
        return token_id
    u = uniform(state.seed, state.sequence, state.num_tokens)
    return draw(edited, maximum, params.temperature, params.top_k, params.top_p, params.min_p, u)


def _greatest_edited(edited: Logits) -> tuple[int, float]:
    try:
        return greatest(edited)
    except LogitsError:
        # The raw logits were valid, so the request's own parameters are the cause.
        raise LogitsError(EXCLUDED if np.isneginf(edited).all() else TOO_LARGE) from None


def edit_logits(logits: Logits, state: SamplerState, mask: Mask | None = None) -> Logits:
    """Return a copy of the logits with all steps before temperature applied.  # [V] -> [V]"""
    edited = logits.copy()
    if state.allowed_ids is not None:
        edited.fill(_MINUS_INF)
        edited[state.allowed_ids] = logits[state.allowed_ids]
    if state.bias_ids is not None:
        edited[state.bias_ids] += state.biases
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=len(edited), bitorder="little")
        np.putmask(edited, allowed == 0, _MINUS_INF)
    if state.suppresses_stop:
        ends = edited[state.stop_ids]
        edited[state.stop_ids] = _MINUS_INF
        if mask is not None and np.isneginf(edited).all():  # only an end token can follow
            edited[state.stop_ids] = ends
    for *before, last in state.params.bad_words_token_ids:
        if not before or state.recent[-len(before) :] == before:
            edited[last] = _MINUS_INF
    _penalize(edited, state)
    return edited


def _penalize(edited: Logits, state: SamplerState) -> None:
    """Apply the repetition (Keskar et al. 2019, "CTRL", section 4.1), frequency and presence penalties."""
    params = state.params
    if state.seen is not None:
        penalty = params.repetition_penalty
        repeated = edited[state.seen].astype(np.float64)  # in float32 a tiny penalty would round to zero
        with np.errstate(over="ignore"):  # overflow is reported by _greatest_edited
            edited[state.seen] = np.where(repeated > 0, repeated / penalty, repeated * penalty)
    if state.output_counts is not None:
        if params.frequency_penalty:
            edited -= np.float32(params.frequency_penalty) * state.output_counts.astype(np.float32)
        if params.presence_penalty:
            edited -= np.float32(params.presence_penalty) * (state.output_counts > 0).astype(np.float32)
