"""Log-probabilities of the model's own distribution, and the ranking of tokens that all sampling shares.

Ranking is a total order: greater logit first, lower id first among equals. So the greedy token, the first of
the top tokens and the token of rank 1 are always the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import QuireError
from quire.types import PositionLogprobs, TokenLogprob

Logits = NDArray[np.float32]
TokenIds = NDArray[np.intp]


class LogitsError(QuireError):
    """Logits of one row from which no token can be chosen; it fails that request alone."""


def greatest(logits: Logits) -> tuple[int, float]:
    """The first token id in the ranking and its logit. Raises LogitsError where there is no such token.

    One pass finds every fault: argmax returns a NaN if there is one, else +inf if there is one.
    """
    token_id = int(logits.argmax())
    maximum = float(logits[token_id])
    if not math.isfinite(maximum):
        what = "only -inf" if maximum == -math.inf else "NaN" if math.isnan(maximum) else "infinity"
        raise LogitsError(f"the model gave {what} for the next token")
    return token_id, maximum


def top_ids(logits: Logits, k: int) -> TokenIds:
    """The first k token ids in the ranking, in its order.  # logits [V] -> [min(k, V)]"""
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]  # the k-th greatest
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - len(above)]
    return np.concatenate([above[np.argsort(-logits[above], kind="stable")], equal])


def rank(logits: Logits, token_id: int) -> int:
    """The place of a token in the ranking, from 1.  # logits [V]"""
    logit = logits[token_id]
    equal_before = np.count_nonzero(logits[:token_id] == logit)
    return 1 + int(np.count_nonzero(logits > logit)) + int(equal_before)


def normalizer(logits: Logits) -> tuple[float, float]:
    """The greatest logit, and the logarithm of sum(exp(logits - greatest)).  # logits [V]

    In float64, summed over the whole row in one fixed order. Raises LogitsError.
    """
    _, maximum = greatest(logits)
    terms = logits.astype(np.float64)
    terms -= maximum
    return maximum, math.log(float(np.exp(terms, out=terms).sum()))


def _logprobs(logits: Logits, maximum: float, log_sum: float) -> NDArray[np.float32]:
    """Natural logarithms of probabilities, rounded once to float32. `maximum`, `log_sum`: the normalizer."""
    with np.errstate(over="ignore"):  # logits further apart than float32 reaches: -inf
        return (logits.astype(np.float64) - maximum - log_sum).astype(np.float32)


def position_logprobs(logits: Logits, token_id: int, k: int) -> PositionLogprobs:
    """The chosen token, then the k most likely ones (all if k is -1), of one row of raw logits.  # [V]

    Where the chosen token is among the others it is there with the very same float and rank.
    Raises LogitsError.
    """
    ids = top_ids(logits, len(logits) if k == -1 else k).tolist() if k else []
    logprobs = _logprobs(logits[[token_id, *ids]], *normalizer(logits)).tolist()
    ranks = [rank(logits, token_id), *range(1, len(ids) + 1)]
    return tuple(map(TokenLogprob, [token_id, *ids], logprobs, ranks))


def prompt_logprobs(logits: Logits, next_token_ids: Sequence[int], k: int) -> tuple[PositionLogprobs, ...]:
    """For each row of a chunk of the prompt, `position_logprobs` of the token that follows it.  # [P, V], [P]

    Row by row with the code that serves sampled tokens: a position has the same bits either way.
    Raises LogitsError.
    """
    rows = zip(logits, next_token_ids, strict=True)
    return tuple(position_logprobs(row, token_id, k) for row, token_id in rows)
