"""Halves of rows, ranges that hold them, and a search for constants."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from quire.roofline.shares import SPREAD

_FACTORS = (1.5, 1.2, 1.07, 1.02)  # by which one constant at a time is changed, in turn


def is_fitted(key: str) -> bool:
    """Return True for rows of the half that constants are fitted on: by a hash of what was measured.

    Rows that repeat a measurement have one key, so both are in the same half.
    """
    return hashlib.sha256(key.encode()).digest()[0] % 2 == 0


def loss(pairs: Sequence[tuple[float, float]]) -> float:
    """Return a loss of (measured, typical) pairs: the share out of range, and a little of the mean error."""
    errors = [abs(math.log(measured / typical)) for measured, typical in pairs]
    outside = sum(error > math.log(SPREAD) / 2 for error in errors)
    return (outside + 0.3 * sum(min(error, 1.5) for error in errors)) / len(errors)


def search(evaluate: Callable[[tuple[float, ...]], float], start: Sequence[float]) -> tuple[float, ...]:
    """Return positive constants with a low value: the best of single steps, while one is better."""
    best = tuple(start)
    lowest = evaluate(best)
    for factor in _FACTORS:
        improved = True
        while improved:
            improved = False
            for index in range(len(best)):
                for times in (factor, 1 / factor):
                    tried = (*best[:index], best[index] * times, *best[index + 1 :])
                    value = evaluate(tried)
                    if value < lowest - 1e-9:
                        lowest, best, improved = value, tried, True
    return best
