"""Arithmetic over a row of logits as long as the vocabulary.

Ranking is a total order: greater logit first, lower id first among equals. So the greedy token, the first of
the top tokens and the token of rank 1 are always the same one. Sums are in float64 and in one order, which
follows from the row. `logits` are those of a row that has a greatest one: neither NaN nor +inf, nor all -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
TokenIds = NDArray[np.intp]
Weights = NDArray[np.float64]  # probabilities up to a common factor


def draw(
    logits: Logits, maximum: float, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> int:
    """Return the token at `u`, in [0, 1), of those kept, by the weights that temperature gives them.

    Top-k and min-p each keep a beginning of the ranking, so their order does not matter; top-p comes last and
    sees only what they kept. What remains is laid out in order of token id, and `u` points into it: the
    inverse of the cumulative distribution. `maximum` is the greatest logit.
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
    """Return the place of a token in the ranking, from 1."""
    logit = logits[token_id]
    equal_before = np.count_nonzero(logits[:token_id] == logit)
    return 1 + int(np.count_nonzero(logits > logit)) + int(equal_before)


def ranking(logits: Logits, k: int) -> TokenIds:
    """The first k token ids in the ranking, in its order.  # logits [V] -> [min(k, V)]"""
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]  # the k-th greatest
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - len(above)]
    return np.concatenate([above[np.argsort(-logits[above], kind="stable")], equal])


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
