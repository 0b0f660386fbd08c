"""Error-compensated rounding: less error of outputs than rounding to nearest, on inputs that correlate."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from quire.quantize import compensate
from quire.quantize.compensate import DAMPING, Moments, compensated, output_error
from quire.quantize.grid import Grid, nearest

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


def correlated(seed: int, tokens: int, width: int) -> np.ndarray:
    """Inputs of a few directions and some noise, a few of them large, as layers have them."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, 12)) @ rng.standard_normal((12, width))
    sizes = np.exp(rng.standard_normal(width))
    return ((mixed + 0.3 * rng.standard_normal((tokens, width))) * sizes).astype(np.float32)


def matrix(seed: int, rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def moments_of(x: np.ndarray) -> Moments:
    moments = Moments.empty(x.shape[1])
    moments.add(x, x)
    return moments


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 32, BF16), (4, 128, F16), (8, 32, BF16)])
def test_outputs_err_less_than_with_rounding_to_nearest(bits: int, group: int, dtype: np.dtype) -> None:
    weight, grid = matrix(0, 70, 128), Grid(bits, group, dtype)
    x, other = np.split(correlated(1, 1200, 128), 2)  # of one distribution
    moments = moments_of(x).damped(DAMPING)
    ours, plain = compensated(weight, moments, grid), nearest(weight, grid)
    assert output_error(weight, ours.dense(), moments) < 0.35 * output_error(weight, plain.dense(), moments)
    unseen = moments_of(other).damped(0.0)
    assert output_error(weight, ours.dense(), unseen) < 0.45 * output_error(weight, plain.dense(), unseen)
    assert np.square(ours.dense() - weight).sum() > np.square(plain.dense() - weight).sum()
    codes = ours.codes
    assert codes.dtype == np.int8
    assert codes.min() >= grid.low
    assert codes.max() <= grid.high
    assert np.array_equal(ours.scales.astype(dtype).astype(np.float32), ours.scales)
    assert (ours.scales != 0).all()


def test_each_round_of_scales_and_descent_lowers_the_error() -> None:
    weight, grid = matrix(2, 40, 96), Grid(4, 32, BF16)
    moments = moments_of(correlated(3, 400, 96)).damped(DAMPING)
    errors = [
        output_error(weight, compensated(weight, moments, grid, rounds=n).dense(), moments) for n in range(4)
    ]
    assert errors[1] < 0.97 * errors[0]
    assert errors == sorted(errors, reverse=True)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, grid = matrix(4, 50, 64), Grid(4, 32, F16)
    moments = moments_of(correlated(5, 300, 64)).damped(DAMPING)
    whole = compensated(weight, moments, grid)
    monkeypatch.setattr(compensate, "_ROWS", 25)
    monkeypatch.setattr(compensate, "_BLOCK", 7)  # columns: sums in another order
    cut = compensated(weight, moments, grid)
    assert (cut.codes != whole.codes).mean() < 0.02
    error = output_error(weight, whole.dense(), moments)
    assert output_error(weight, cut.dense(), moments) == pytest.approx(error, rel=0.02)


def test_without_correlation_rounding_to_nearest_is_not_beaten_by_much() -> None:
    weight, grid = matrix(6, 30, 64), Grid(4, 32, BF16)
    ours = output_error(weight, compensated(weight, np.eye(64), grid).dense(), np.eye(64))
    plain = output_error(weight, nearest(weight, grid).dense(), np.eye(64))
    assert 0.7 * plain < ours <= plain


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e8])
def test_extreme_weights_and_inputs_are_finite(value: float) -> None:
    weight = matrix(7, 5, 64)
    weight[:, :32] = value
    weight[2] = 0
    x = correlated(8, 50, 64)
    x[:, 5] = 0  # an input that is never used
    for dtype in (BF16, F16):
        found = compensated(weight, moments_of(x).damped(DAMPING), Grid(4, 32, dtype))
        assert np.isfinite(found.dense()).all()
        assert not found.dense()[2].any()
    none = Moments.empty(64).damped(DAMPING)  # an expert that no token chose
    assert np.isfinite(compensated(matrix(9, 5, 64), none, Grid(4, 32, BF16)).dense()).all()


def test_weights_undo_a_share_of_the_drift_of_their_inputs() -> None:
    """If the inputs y are x with an error that y predicts, W' y is nearer to W x than W y is."""
    x = correlated(10, 500, 64)
    y = x * np.float32(0.9)
    weight, moments = matrix(11, 20, 64), Moments.empty(64)
    moments.add(x, y)
    corrected = moments.corrected(weight, 1e-6, share=1.0)
    assert np.abs(y @ corrected.T - x @ weight.T).max() < 1e-2 * np.abs(x @ weight.T).max()
    half = moments.corrected(weight, 1e-6, share=0.5)
    assert np.allclose(half, (corrected + weight) / 2, atol=1e-4)
    assert moments_of(x).corrected(weight, 0.1) is weight


def test_importance_moves_scales_to_inputs_that_matter() -> None:
    weight, grid = matrix(12, 200, 32), Grid(4, 32, BF16)
    importance = np.ones(32)
    importance[::4] = 100
    plain, aware = (nearest(weight, grid, used).dense() - weight for used in (None, importance))
    assert np.square(aware[:, ::4]).sum() < np.square(plain[:, ::4]).sum()
    assert np.square(aware).sum() > np.square(plain).sum()
