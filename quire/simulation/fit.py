"""Fit the shares of a roof to latencies that were measured: damped least squares over simulations.

For servers whose steps cannot be measured, such as published runs: only when each request was sent, its first
token and its last one are known. The first requests are fitted; the lengths and arrivals of later ones count
as far as they compete with those, their latencies do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.bench.metrics import Timeline
from quire.simulation.shares import RoofShares

MAX_STEPS = 12
SMALL_GAIN = 0.02  # of the error: it ends the search
STEP = 0.05  # of a parameter's unit, to find its slope
DAMPING, MOST_DAMPING = 1e-2, 10.0
UNITS = RoofShares(1.0, 1.0, 3e-3, 3e-5, 3e-3, 1e-4)
LOWEST, HIGHEST = RoofShares(0.02, 0.02), RoofShares(1.2, 1.2, 1.0, 0.1, 1.0, 0.1)
START = RoofShares(0.9, 0.7, 1e-3, 1e-5)
SEEN_BY_ENGINE = 4  # shares to be fitted where latencies are those that the engine saw,
SEEN_BY_CLIENTS = 6  # and where they are those of its clients


class Latency(NamedTuple):
    """Of one request, in seconds: time to first token, and time per output token after it."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, timeline: Timeline) -> Latency:
        """Return the latency of a request; one of a single token has no time per token."""
        return cls(timeline.ttft_s or 0.0, timeline.tpot_s or 0.0)


Run = Sequence[Latency]  # those requests of a run that are fitted
Predict = Callable[[RoofShares], Sequence[Run]]  # simulates all runs
Errors = Callable[[np.ndarray], np.ndarray]


def fit(measured: Sequence[Run], predict: Predict, num_free: int = SEEN_BY_ENGINE) -> RoofShares:
    """Return the shares at which the predicted latencies are nearest to those measured.

    Each run counts the same, and so do both kinds of latency: errors are relative to the mean of a run. The
    error of that mean counts as much as those of all requests. The first `num_free` shares are fitted.
    """
    wanted = [np.array(run) for run in measured]
    unit, low, high = (np.array(shares[:num_free]) for shares in (UNITS, LOWEST, HIGHEST))

    def shares_at(point: np.ndarray) -> RoofShares:
        return RoofShares(*(point * unit).tolist())

    def errors(point: np.ndarray) -> np.ndarray:
        parts = []
        for run, predicted in zip(wanted, predict(shares_at(point)), strict=True):
            relative = (np.array(predicted) - run) / run.mean(axis=0)
            parts += [relative.ravel() / len(run) ** 0.5, relative.mean(axis=0)]
        return np.concatenate(parts)

    return shares_at(_least_squares(errors, np.array(START[:num_free]) / unit, low / unit, high / unit))


def relative_errors(found: Run, measured: Run) -> Latency:
    """Return the errors of mean latencies, relative to those measured."""
    means = ([sum(values) / len(run) for values in zip(*run, strict=True)] for run in (found, measured))
    return Latency(*(a / b - 1 for a, b in zip(*means, strict=True)))


def _least_squares(errors: Errors, point: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the point within bounds with the least sum of squared errors.

    Levenberg and Marquardt's steps, on slopes that Broyden's rule keeps up to date: they are measured again
    only where steps do not help.
    """
    error = errors(point)
    slopes, damping, is_fresh = _slopes(errors, point, error, high), DAMPING, True
    for _ in range(MAX_STEPS):
        normal = slopes.T @ slopes
        normal += damping * np.diag(np.diag(normal) + 1e-9)
        tried = np.clip(point - np.linalg.solve(normal, slopes.T @ error), low, high)
        step, found = tried - point, errors(tried)
        gain = 1 - (found @ found) / (error @ error)
        if step @ step > 0:
            slopes = slopes + np.outer(found - error - slopes @ step, step) / (step @ step)
        if gain > 0:
            point, error, damping, is_fresh = tried, found, damping / 4, False
        elif not is_fresh:
            slopes, is_fresh = _slopes(errors, point, error, high), True
        else:
            damping *= 8
        if damping > MOST_DAMPING or 0 < gain < SMALL_GAIN:
            break
    return point


def _slopes(errors: Errors, point: np.ndarray, error: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return how the errors change with each parameter, towards the inside of its bounds."""
    columns = []
    for index in range(len(point)):
        step = STEP if point[index] + STEP <= high[index] else -STEP
        moved = point.copy()
        moved[index] += step
        columns.append((errors(moved) - error) / step)
    return np.stack(columns, axis=1)
