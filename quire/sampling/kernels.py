"""Sampling kernels: functions of one row of logits over the vocabulary.

The ranking is a total order: greater logit first, lower id first among equals. So the greedy token, the first
of the top tokens and the token of rank 1 are always the same. Sums are in float64, in one order determined by
the row. `logits` must have a finite maximum: no NaN, no +inf, not all -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
TokenIds = NDArray[np.intp]
Weights = NDArray[np.float64]  # unnormalized probabilities


def draw(
    logits: Logits, maximum: float, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> int:
    """Return the token drawn by `u`, in [0, 1), from the kept tokens, weighted by temperature.

    Top-k and min-p each keep a prefix of the ranking, so their order does not matter; top-p is last and
    applies to what they kept. The kept tokens are in order of token id, and `u` is mapped by the inverse of
    the cumulative distribution. `maximum` is the greatest logit.
    """
    ids: TokenIds | None = None  # of the tokens kept; None: all
    if 0 < top_k < len(logits):
        ids = ranking(logits, top_k)
        logits = logits[ids]
    weights = boltzmann(logits, maximum, temperature)
    if min_p > 0:
        weights[weights < min_p] = 0  # the greatest weight is 1
    if top_p < 1:
        kept = nucleus(logits, weights, top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    if ids is None:
        return inverse_cumulative(weights, u)
    in_order = np.argsort(ids)
    return int(ids[in_order[inverse_cumulative(weights[in_order], u)]])


def exp_sum(logits: Logits, maximum: float) -> float:
    """Return sum(exp(logits - maximum)), `maximum` being the greatest logit."""
    return float(boltzmann(logits, maximum, 1).sum())


def rank(logits: Logits, token_id: int) -> int:
    """Return the rank of a token, from 1."""
    logit = logits[token_id]
    equal_before = np.count_nonzero(logits[:token_id] == logit)
    return 1 + int(np.count_nonzero(logits > logit)) + int(equal_before)


def ranking(logits: Logits, k: int) -> TokenIds:
    """Return the first k token ids of the ranking, in its order.  # logits [V] -> [min(k, V)]"""
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]  # the k-th greatest
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - len(above)]
    return np.concatenate([above[np.argsort(-logits[above], kind="stable")], equal])


def boltzmann(logits: Logits, maximum: float, temperature: float) -> Weights:
    """Return exp((logits - maximum) / temperature) in float64; the greatest weight is 1."""
    exponents = logits.astype(np.float64)
    exponents -= maximum
    with np.errstate(over="ignore"):  # a difference divided by a tiny temperature: -inf, weight 0
        exponents /= temperature
    return np.exp(exponents, out=exponents)


def nucleus(logits: Logits, weights: Weights, top_p: float) -> TokenIds:
    """Return the shortest prefix of the ranking whose weights reach `top_p` of the total, at least one token.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    total = float(weights.sum())
    # All tokens with smaller weights together have less than 1 - top_p of the total: none is in the nucleus,
    # and none need be sorted. The factor 0.5 allows for rounding.
    lightest = 0.5 * (1 - top_p) * total / len(weights)
    ids = np.flatnonzero(weights >= lightest)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    cumulative = np.cumsum(weights[ids])
    return ids[: int(np.searchsorted(cumulative, top_p * total)) + 1]


def inverse_cumulative(weights: Weights, u: float) -> int:
    """Return the index where the cumulative sum of the weights first exceeds `u` times the total."""
    cumulative = np.cumsum(weights)
    # u is at most 1 - 2**-53, so the product is below the total even when rounded: the index exists, and its
    # token has a positive weight, because the cumulative sum grows there.
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
