"""Kernels of single numbers in Triton's interpreter, against the NumPy references of their ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.backends.cuda import interpreter
from quire.backends.cuda.kernels import elementwise
from quire.program.numerics import ACTIVATIONS, sigmoid

ROWS, WIDTH = 3, 70
OWN_NAMES = {"gelu_tanh": "gelu_new"}


def normal(seed: int, width: int = WIDTH) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal((ROWS, width)).astype(np.float32)


def run(kernel: Any, *args: Any, width: int = WIDTH, **constants: Any) -> np.ndarray:
    """Run a kernel over rows in blocks of 64; return what it writes."""
    out = np.full((ROWS, width), np.nan, np.float32)
    grid = (ROWS, -(-width // 64))
    interpreter.run(kernel, grid, [out, *args], constants | {"BLOCK": 64})
    return out


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "sigmoid", "tanh", "relu", "relu2", "linear"])
def test_activations(name: str) -> None:
    x, up, gate = normal(0), normal(1), normal(2, 1)
    x[0, :4] = 0, 100, -100, np.nan
    activation = ACTIVATIONS[OWN_NAMES.get(name, name)]
    wanted = activation(x)
    assert near(run(elementwise.unary, x, WIDTH, ACTIVATION=name), wanted)
    found = run(elementwise.gated_activation, x, up, WIDTH, WIDTH, 0.0, ACTIVATION=name)
    assert near(found, wanted * up)
    found = run(elementwise.gated_activation, gate, up, WIDTH, 1, 0.0, ACTIVATION=name)
    assert near(found, activation(gate) * up)


def test_limited_activation() -> None:
    """The activation of gpt-oss, whose limits let NaN pass."""
    gate, up = normal(0) * 3, normal(1) * 3
    gate[0, :3], up[1, :3] = (np.nan, 100, -100), (np.nan, 100, -100)
    limited, within = np.minimum(gate, np.float32(1.5)), np.clip(up, np.float32(-1.5), np.float32(1.5))
    wanted = limited * sigmoid(np.float32(1.702) * limited) * (within + 1)
    found = run(elementwise.gated_activation, gate, up, WIDTH, WIDTH, 1.5, ACTIVATION="limited")
    assert near(found, wanted)


def near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return np.allclose(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_sums_and_factors() -> None:
    x, y, weight = normal(0), normal(1), normal(2)[0, :35]
    assert (run(elementwise.add, x, y, WIDTH) == x + y).all()
    assert (run(elementwise.scale, x, WIDTH, 0.3) == x * np.float32(0.3)).all()
    assert (run(elementwise.scale_by_weight, x, weight, WIDTH, 35) == x * np.tile(weight, 2)).all()
    assert (run(elementwise.scale_by_weight, x, weight, WIDTH, 1) == x * weight[0]).all()


def test_scale_by_position() -> None:
    x, positions, beta = normal(0), np.array([0, 8191, 100_000], np.int32), np.array([0.1])
    found = run(elementwise.scale_by_position, x, positions, WIDTH, beta, 8192, 1)
    factors = (1 + 0.1 * np.log(1.0 + (positions + 1) // 8192)).astype(np.float32)
    assert (found == x * factors[:, None]).all()


def test_soft_cap() -> None:
    x = normal(0) * 20
    wanted = np.float32(30) * np.tanh(x / np.float32(30))
    assert np.allclose(run(elementwise.soft_cap, x, WIDTH, 30.0), wanted, rtol=0, atol=1e-5)


def test_xielu() -> None:
    """Numbers of every size, of which small ones keep their bits, with the factors of a checkpoint."""
    x = normal(0) * np.logspace(-7, 1, WIDTH, dtype=np.float32)
    x[0, :6] = 0, 60, -100, np.nan, np.inf, -np.inf
    rise, fall = np.array([0.8], np.float32), np.array([-1.5], np.float32)
    positive, negative = np.logaddexp(np.float64([*rise, *fall]), 0) + np.array([0, 0.5])
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        low = negative * (np.expm1(np.minimum(wide, 0)) - np.minimum(wide, 0))
        wanted = np.where(wide > 0, positive * wide * wide, low) + 0.5 * wide
    found = run(elementwise.xielu, x, rise, fall, WIDTH, 0.5)
    assert np.allclose(found, wanted, rtol=2e-6, atol=0, equal_nan=True)


def test_columns() -> None:
    x, y = normal(0), normal(1, 30)
    assert (run(elementwise.take_columns, x, 20, WIDTH, 45, width=20) == x[:, 45:65]).all()
    found = run(elementwise.join_columns, x, y, WIDTH + 30, WIDTH, width=WIDTH + 30)
    assert (found == np.concatenate([x, y], 1)).all()
