"""Error-compensated rounding: minimize the error of a layer's outputs, not that of its weights.

For inputs x with second moments H = E[x x^T], rounding W to Q costs E|(W - Q) x|^2, the sum over rows of
(w - q) H (w - q)^T. Three steps lower it, each exact in what it minimizes:

1. Column by column, in order of decreasing moments, a column is rounded and its error is made up for by the
   columns not yet rounded (GPTQ, arXiv:2210.17323: the Cholesky factor of H^-1 says how).
2. With the integers fixed, the scales of a row are the solution of a small linear system.
3. With the scales fixed, each integer in turn takes its best value given all others (coordinate descent).

The last two are repeated. Calibration text is finite, so H gets a share of its mean diagonal added (damping).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.quantize.grid import Grid, Rounded, best_scales
from quire.quantize.kinds import Array, Floats

DAMPING = 0.2  # of the mean diagonal; 0.01, as published, overfits texts of a few thousand tokens
ROUNDS = 2  # of scales and coordinate descent
DRIFT = 0.5  # share of the drift of inputs that weights correct; all of it overfits

_BLOCK = 64  # columns whose updates of the others are collected for one product
_ROWS = 2048  # processed together

Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@dataclass(slots=True)
class Moments:
    """Sums over inputs of a matrix: `square` = sum of y y^T and `drift` = sum of (x - y) y^T, float64.

    x are the inputs in the original model and y those in the quantized one, which differ because earlier
    layers are quantized already.
    """

    square: Array  # [in, in]
    drift: Array  # [in, in]
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> Moments:
        return cls(np.zeros((width, width)), np.zeros((width, width)))

    def add(self, original: Floats, quantized: Floats) -> None:
        """Add inputs [T, in] of both models."""
        self.square += quantized.T @ quantized
        if original is not quantized:
            self.drift += (original - quantized).T @ quantized
        self.count += len(quantized)

    def damped(self, damping: float) -> Array:
        """Return the second moments, scaled to a mean diagonal of 1, with damping added."""
        mean = np.trace(self.square) / max(len(self.square), 1)
        scaled = self.square / mean if mean > 0 else np.zeros_like(self.square)
        return np.asarray(scaled + np.eye(len(scaled)) * damping)

    def corrected(self, weight: Floats, damping: float, share: float = DRIFT) -> Floats:
        """Return weights that undo a share of the drift: W + share * W drift H^-1."""
        mean = np.trace(self.square) / max(len(self.square), 1)
        if not mean > 0 or not self.drift.any():
            return weight
        undo = np.linalg.solve(self.damped(damping), (self.drift / mean).T).T
        return weight + (weight @ (share * undo).astype(np.float32))


def compensated(
    weight: Floats, moments: Array, grid: Grid, mapper: Mapper = map, rounds: int = ROUNDS
) -> Rounded:
    """Round a matrix [out, in] for inputs with these damped second moments [in, in]; rows are independent."""
    order = np.argsort(-np.diag(moments), kind="stable")
    inverse = np.linalg.inv(moments[np.ix_(order, order)])
    factor = np.linalg.cholesky(inverse).T.astype(np.float32)
    square = moments.astype(np.float32)

    def work(first: int) -> tuple[Array, Floats]:
        rows = weight[first : first + _ROWS]
        scales = best_scales(rows, grid, np.diag(moments))
        codes = _in_order(rows, scales, factor, order, grid)
        for _ in range(rounds):
            scales = _fitted_scales(rows, codes, scales, square, grid)
            codes = _descended(rows, codes, scales, square, grid)
        return codes.astype(np.int8), scales

    parts = list(mapper(work, range(0, len(weight), _ROWS)))
    return Rounded(grid, np.concatenate([q for q, _ in parts]), np.concatenate([s for _, s in parts]))


def output_error(weight: Floats, rounded: Floats, moments: Array) -> float:
    """Return the sum over rows of (w - q) H (w - q)^T: the mean squared error of the outputs."""
    rest = rounded - weight
    return float(np.einsum("oi,oi->", rest @ moments.astype(np.float32), rest, dtype=np.float64))


def _in_order(rows: Floats, scales: Floats, factor: Floats, order: Array, grid: Grid) -> Floats:
    """Round columns in this order, each error made up for by later columns. Returns codes [n, in]."""
    steps = np.repeat(scales.T, grid.group, axis=0)[order]  # [in, n]: a column of weights is contiguous
    rest = np.ascontiguousarray(rows.T[order])
    codes = np.empty_like(rest)
    width = len(rest)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = np.empty((end - start, rest.shape[1]), np.float32)
        for j in range(start, end):
            codes[j] = np.clip(np.rint(rest[j] / steps[j]), grid.low, grid.high)
            errors[j - start] = (rest[j] - codes[j] * steps[j]) / factor[j, j]
            rest[j + 1 : end] -= factor[j, j + 1 : end, None] * errors[j - start]
        rest[end:] -= factor[start:end, end:].T @ errors
    back = np.empty_like(order)
    back[order] = np.arange(width)
    return np.ascontiguousarray(codes[back].T)


def _fitted_scales(rows: Floats, codes: Floats, scales: Floats, square: Floats, grid: Grid) -> Floats:
    """Return the scales with the least output error for these codes, [n, groups]; unused groups keep theirs.

    For a row with the codes q_g of group g: sum over h of (q_g H_gh q_h^T) s_h = q_g (H w^T)_g.
    """
    count, groups = scales.shape
    apart = codes.reshape(count, groups, grid.group)
    wanted = np.einsum("ngi,ngi->ng", apart, (rows @ square).reshape(apart.shape), dtype=np.float64)
    system = np.empty((count, groups, groups))
    for g in range(groups):
        cut = slice(g * grid.group, (g + 1) * grid.group)
        system[:, g] = np.einsum("ngi,ngi->ng", (apart[:, g] @ square[cut]).reshape(apart.shape), apart)
    diagonal = np.einsum("ngg->ng", system)
    used = diagonal > 0
    diagonal += np.where(used, 1e-7 * diagonal, 1.0)
    fitted = np.linalg.solve(system, wanted[..., None])[..., 0]
    return np.where(used, grid.scales(fitted.astype(np.float32)), scales)


def _descended(rows: Floats, codes: Floats, scales: Floats, square: Floats, grid: Grid) -> Floats:
    """Give each code in turn its best value with all others fixed: the output error never grows."""
    steps = np.repeat(scales.T, grid.group, axis=0)
    found = np.ascontiguousarray(codes.T)
    slope = square @ (found * steps - rows.T)  # half the gradient of the error, [in, n]
    width = len(found)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        moves = np.empty((end - start, found.shape[1]), np.float32)
        for j in range(start, end):
            best = found[j] - slope[j] / (square[j, j] * steps[j])
            best = np.clip(np.rint(best), grid.low, grid.high)
            moves[j - start] = (best - found[j]) * steps[j]
            found[j] = best
            slope[j + 1 : end] += square[j, j + 1 : end, None] * moves[j - start]
        slope[end:] += square[start:end, end:].T @ moves
    return np.ascontiguousarray(found.T)
