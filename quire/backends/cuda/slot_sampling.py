"""Sampling parameters of a slot of an accelerator, as the kernels take them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from quire.sampling.pipeline import Mask
from quire.types import Admission

_NEVER = -np.inf  # as the bias of a token


def samples_on_device(admission: Admission) -> bool:
    """Return whether there are kernels for all parameters of a request, whatever else a step computes.

    There are none for lists of the whole vocabulary, for bad words of several tokens, which depend on the
    last tokens, and for an end that is delayed unless a grammar allows nothing else.
    """
    params = admission.params
    lists_all = -1 in (params.logprobs, params.prompt_logprobs)
    has_phrases = any(len(word) > 1 for word in params.bad_words_token_ids)
    return not (lists_all or has_phrases or (admission.grammar and params.min_tokens))


def drafted_sampling(admission: Admission, vocab_size: int) -> SlotSampling:
    """Return what draft models draw by: the parameters of a request, as far as there are kernels for them.

    Slots that the host samples have no counts for penalties.
    """
    if not samples_on_device(admission):
        words = [word for word in admission.params.bad_words_token_ids if len(word) == 1]
        params = replace(admission.params, bad_words_token_ids=words)
        params = replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
        admission = replace(admission, params=params)
    return SlotSampling(admission, vocab_size)


class SlotSampling:
    """The sampling parameters of a sequence. None of them changes from admission to release."""

    __slots__ = (
        "_allowed",
        "_biases",
        "_num_words",
        "_stop_ids",
        "_stops_from",
        "params",
        "penalizes",
        "sequence",
    )

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        if admission.params.seed is None:
            raise ValueError("sampling needs a seed: resolve None before admission")
        self.params = params = admission.params
        self.sequence = admission.sequence
        self.penalizes = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self._num_words = -(-vocab_size // 32)
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else self._bits(allowed)
        self._biases = dict(params.logit_bias or {})
        self._biases |= {word[-1]: _NEVER for word in params.bad_words_token_ids}
        # The tokenizer may have an end token that the model cannot produce.
        self._stop_ids = {*params.stop_token_ids, *(i for i in admission.eos_token_ids if i < vocab_size)}
        self._stops_from = admission.num_prompt_tokens + params.min_tokens

    def _bits(self, token_ids: Collection[int]) -> Mask:
        allowed = np.zeros(32 * self._num_words, np.bool_)
        allowed[np.array(token_ids, np.intp)] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def biases(self, position: int) -> dict[int, float]:
        """Return what is added to logits for the token at a position, -inf for tokens that may not follow."""
        if position >= self._stops_from:
            return self._biases
        return self._biases | dict.fromkeys(self._stop_ids, _NEVER)

    def mask(self, grammar: Mask | None) -> Mask | None:
        """Return the bits of the tokens that may follow, with those that a grammar allows; None: all."""
        if grammar is None:
            return self._allowed
        own = np.zeros(self._num_words, np.uint32)
        words = min(len(own), len(grammar))
        own[:words] = grammar[:words]
        return own if self._allowed is None else own & self._allowed

    def edits(self, position: int, grammar: Mask | None) -> bool:
        """Return whether the logits for a position differ from those that the model gave."""
        has_mask = grammar is not None or self._allowed is not None
        return has_mask or self.penalizes or bool(self.biases(position))
