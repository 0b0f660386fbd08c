"""From a row of logits to a token, by the pipeline of docs/sampling.md.

Each row is computed by itself, so its bits cannot depend on the rows beside it. Nothing here is remembered
from one draw to the next except counts of tokens, which follow from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.runner.logprobs import Logits, LogitsError, TokenIds, greatest, position_logprobs, top_ids
from quire.runner.philox import uniform
from quire.sampling_params import SamplingParams
from quire.types import Admission, RowResult

Weights = NDArray[np.float64]  # probabilities up to a common factor

_MINUS_INF = np.float32(-np.inf)


class SamplerState:
    """What sampling needs to know of the choice in a slot.

    A function of the admission and the tokens alone: built again from all known tokens after a preemption, it
    is what it was. Arrays of the vocabulary's size exist only while a parameter needs them.

    The caller has checked the token ids of `admission.params` with `check_vocabulary`, and has replaced a
    seed of None.
    """

    __slots__ = (
        "allowed_ids",
        "bias_ids",
        "biases",
        "choice",
        "edits_logits",
        "num_prompt_tokens",
        "num_tokens",
        "output_counts",
        "params",
        "recent",
        "seed",
        "seen",
        "stop_ids",
    )

    def __init__(self, admission: Admission, token_ids: Sequence[int], vocab_size: int) -> None:
        """`token_ids` are all known tokens: the prompt's, then those emitted before a preemption."""
        params = admission.params
        if params.seed is None:
            raise ValueError("SamplerState needs a seed: resolve None before admission")
        self.params = params
        self.seed = params.seed
        self.choice = admission.choice
        self.num_prompt_tokens = admission.num_prompt_tokens
        self.num_tokens = self.num_prompt_tokens
        self.recent: list[int] = []  # the last emitted tokens, as many as bad words look back
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
        # A tokenizer may know an end token that the model cannot give.
        stop_ids = {*params.stop_token_ids, *(i for i in eos_token_ids if i < vocab_size)}
        self.stop_ids = np.array(sorted(stop_ids), np.intp)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take note of tokens just emitted. O(their number)."""
        self.num_tokens += len(token_ids)
        if self.seen is not None:
            self.seen[np.array(token_ids, np.intp)] = True
        if self.output_counts is not None:
            np.add.at(self.output_counts, np.array(token_ids, np.intp), 1)
        if self.params.bad_words_token_ids:
            longest = max(map(len, self.params.bad_words_token_ids))
            self.recent = [*self.recent, *token_ids][-longest:]

    @property
    def suppresses_stop(self) -> bool:
        """True until `min_tokens` tokens have been emitted."""
        return self.num_tokens - self.num_prompt_tokens < self.params.min_tokens


def sample(logits: Logits, state: SamplerState) -> RowResult:
    """Choose the token that follows all tokens of `state`; neither argument is changed.  # logits [V]

    The position of the random draw is the index of the new token in the sequence. Call `state.extend` with
    the token before choosing the one after it. Logits that are not numbers, and constraints that leave no
    token, give a RowResult with `error` set and no token.
    """
    params = state.params
    try:
        token_id, maximum = greatest(logits)
        edited = logits
        if state.edits_logits or state.suppresses_stop:
            edited = edit_logits(logits, state)
            token_id, maximum = _greatest_edited(edited)
        if params.temperature != 0:
            u = uniform(state.seed, state.choice, state.num_tokens)
            token_id = draw(edited, maximum, params, u)
        if params.logprobs is None:
            return RowResult((token_id,))
        return RowResult((token_id,), (position_logprobs(logits, token_id, params.logprobs),))
    except LogitsError as error:
        return RowResult(error=error.message)


def _greatest_edited(edited: Logits) -> tuple[int, float]:
    try:
        return greatest(edited)
    except LogitsError:
        # The raw logits were in order, so the request's own parameters did this.
        if np.isneginf(edited).all():
            names = "allowed_token_ids, min_tokens and bad_words"
            raise LogitsError(f"no token may follow: {names} exclude every one") from None
        raise LogitsError("repetition_penalty makes a logit too large for a number") from None


def edit_logits(logits: Logits, state: SamplerState) -> Logits:
    """A copy of the logits with everything applied that precedes temperature.  # [V] -> [V]"""
    edited = logits.copy()
    if state.allowed_ids is not None:
        edited.fill(_MINUS_INF)
        edited[state.allowed_ids] = logits[state.allowed_ids]
    if state.bias_ids is not None:
        edited[state.bias_ids] += state.biases
    if state.suppresses_stop:
        edited[state.stop_ids] = _MINUS_INF
    for *before, last in state.params.bad_words_token_ids:
        if not before or state.recent[-len(before) :] == before:
            edited[last] = _MINUS_INF
    _penalize(edited, state)
    return edited


def _penalize(edited: Logits, state: SamplerState) -> None:
    """Repetition (Keskar et al. 2019, "CTRL", section 4.1), then frequency, then presence, in place."""
    params = state.params
    if state.seen is not None:
        penalty = params.repetition_penalty
        repeated = edited[state.seen].astype(np.float64)  # in float32 a tiny penalty would be zero
        with np.errstate(over="ignore"):  # what is too large is reported by _greatest_edited
            edited[state.seen] = np.where(repeated > 0, repeated / penalty, repeated * penalty)
    if state.output_counts is not None:
        edited -= np.float32(params.frequency_penalty) * state.output_counts.astype(np.float32)
        edited -= np.float32(params.presence_penalty) * (state.output_counts > 0).astype(np.float32)


def draw(logits: Logits, maximum: float, params: SamplingParams, u: float) -> int:
    """Draw a token by temperature, top-k, min-p and top-p from edited logits, whose greatest is `maximum`.

    Top-k and min-p each keep a beginning of the ranking, so their order does not matter; top-p comes last and
    sees only what they kept. What remains is laid out in order of token id, and `u`, in [0, 1), points into
    it: the inverse of the cumulative distribution.  # logits [V]
    """
    ids: TokenIds | None = None  # of the tokens kept; None: all
    if 0 < params.top_k < len(logits):
        ids = top_ids(logits, params.top_k)
        logits = logits[ids]
    weights = boltzmann(logits, maximum, params.temperature)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0  # the greatest weight is 1
    if params.top_p < 1:
        kept = nucleus(logits, weights, params.top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    if ids is None:
        return inverse_cumulative(weights, u)
    in_order = np.argsort(ids)
    return int(ids[in_order[inverse_cumulative(weights[in_order], u)]])


def boltzmann(logits: Logits, maximum: float, temperature: float) -> Weights:
    """exp((logits - maximum) / temperature) in float64; the greatest is 1, no exponent is positive."""
    exponents = logits.astype(np.float64)
    exponents -= maximum
    with np.errstate(over="ignore"):  # a difference over a tiny temperature: -inf, weight 0
        exponents /= temperature
    return np.exp(exponents, out=exponents)


def nucleus(logits: Logits, weights: Weights, top_p: float) -> TokenIds:
    """The shortest beginning of the ranking whose weights reach `top_p` of their sum, at least one token.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    total = float(weights.sum())
    # All tokens lighter than this weigh less than 1 - top_p of the sum together: none is in the nucleus, and
    # none need be sorted. The half leaves room for rounding.
    lightest = 0.5 * (1 - top_p) * total / len(weights)
    ids = np.flatnonzero(weights >= lightest)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    cumulative = np.cumsum(weights[ids])
    return ids[: int(np.searchsorted(cumulative, top_p * total)) + 1]


def inverse_cumulative(weights: Weights, u: float) -> int:
    """The index at which the running sum of the weights first exceeds the fraction `u` of their sum."""
    cumulative = np.cumsum(weights)
    # u is at most 1 - 2**-53, so the product is below the sum also when rounded: the index exists, and its
    # token has weight, because the running sum grows there.
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
