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
EXACT = 1e-12  # sum of squared errors with which it ends, too
# Of a number's unit, or of the number, to find its slope. Errors jump where a request joins another step, so
# that slopes found nearby point anywhere: the search goes over long distances first.
DISTANCES = (0.3, 0.1)
DAMPING, MOST_DAMPING = 1e-2, 1e3
FAR = 1.5  # times slower than at START: the search begins at two points
START = RoofShares(0.9, 0.7, 1e-3, 1e-5)
SEEN_BY_ENGINE = 4  # shares to be fitted where latencies are those that the engine saw,
SEEN_BY_CLIENTS = 6  # and where they are those of its clients
# What is fitted are the numbers that times grow with: how much slower than the roof, and what is added.
_UNITS = np.array([1.0, 1.0, 3e-3, 3e-5, 3e-3, 1e-4])
_LOWEST = np.array([0.8, 0.8, 0.0, 0.0, 0.0, 0.0])


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
    error of that mean counts most. The first `num_free` shares are fitted.
    """
    wanted = [np.array(run) for run in measured]

    def shares_at(point: np.ndarray) -> RoofShares:
        memory, arithmetic, *added = (point * _UNITS[:num_free]).tolist()
        return RoofShares(1 / memory, 1 / arithmetic, *added)

    def errors(point: np.ndarray) -> np.ndarray:
        parts = []
        for run, predicted in zip(wanted, predict(shares_at(point)), strict=True):
            relative = (np.array(predicted) - run) / run.mean(axis=0)
            parts += [relative.ravel() / len(run) ** 0.5, 3 * relative.mean(axis=0)]
        return np.concatenate(parts)

    start = np.array([1 / START.memory, 1 / START.arithmetic, *START[2:num_free]]) / _UNITS[:num_free]
    pairs = zip(wanted, predict(START), strict=True)
    ratios = [run[:, 1].mean() / max(np.array(found)[:, 1].mean(), 1e-9) for run, found in pairs]
    starts = [start]
    if (slower := float(np.mean(ratios))) > FAR:  # then what is slow may be the roof or what is added
        starts.append(start * slower)
    low = _LOWEST[:num_free] / _UNITS[:num_free]
    found = []
    for point in starts:
        for distance in DISTANCES:
            point, error = _least_squares(errors, point, low, distance)
        found.append((error, point))
    return shares_at(min(found, key=lambda one: one[0])[1])


def relative_errors(found: Run, measured: Run) -> Latency:
    """Return the errors of mean latencies, relative to those measured."""
    means = ([sum(values) / len(run) for values in zip(*run, strict=True)] for run in (found, measured))
    return Latency(*(a / b - 1 for a, b in zip(*means, strict=True)))


def _least_squares(
    errors: Errors, point: np.ndarray, low: np.ndarray, distance: float
) -> tuple[np.ndarray, float]:
    """Return the point, nowhere below `low`, with the least sum of squared errors, and that sum.

    Levenberg and Marquardt's steps, on slopes that Broyden's rule keeps up to date: they are measured again
    only where steps do not help.
    """
    error = errors(point)
    slopes, damping, is_fresh = _slopes(errors, point, error, distance), DAMPING, True
    for _ in range(MAX_STEPS):
        normal = slopes.T @ slopes
        normal += damping * np.diag(np.diag(normal) + 1e-9)
        tried = np.maximum(point - np.linalg.solve(normal, slopes.T @ error), low)
        step, found = tried - point, errors(tried)
        gain = 1 - (found @ found) / (error @ error)
        if step @ step > 0:
            slopes = slopes + np.outer(found - error - slopes @ step, step) / (step @ step)
        was_fresh, is_fresh = is_fresh, False
        if gain > 0:
            point, error, damping = tried, found, damping / 4
        if (was_fresh and 0 < gain < SMALL_GAIN) or damping > MOST_DAMPING or error @ error < EXACT:
            break
        if gain < SMALL_GAIN and not was_fresh:
            slopes, is_fresh = _slopes(errors, point, error, distance), True
        elif gain <= 0:
            damping, is_fresh = damping * 8, True
    return point, float(error @ error)


def _slopes(errors: Errors, point: np.ndarray, error: np.ndarray, distance: float) -> np.ndarray:
    """Return how the errors change with each number, over a distance of it."""
    columns = []
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += distance * max(1.0, point[index])
        columns.append((errors(moved) - error) / (moved[index] - point[index]))
    return np.stack(columns, axis=1)
