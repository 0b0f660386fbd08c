"""Kernels of quantized weights in Triton's interpreter: equal to the NumPy reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from quire.backends.cuda import interpreter, packing
from quire.backends.cuda.kernels import quantized
from quire.backends.cuda.launch_list import product_grid
from quire.program import numerics
from quire.quantize.integers import Int4, Int8, pack

Weight = Int8 | Int4
KINDS = ("int8", "int4")


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    scales = rng.integers(-127, 128, (outputs, -(-inputs // 32))).astype(np.int8)
    channels = (rng.random(outputs) / 500).astype(np.float32)
    if kind == "int8":
        return Int8(rng.integers(-128, 128, (outputs, inputs)).astype(np.int8), scales, channels)
    return Int4(pack(rng.integers(0, 16, (outputs, inputs))), scales, channels, inputs)


def activations(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Return rows of very different sizes, with a group of zeros."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal((rows, inputs))
        * np.exp(3 * rng.standard_normal((rows, -(-inputs // 8)))).repeat(8, 1)[:, :inputs]
    )
    x[0, :32] = 0
    return x.astype(np.float32)


Rounded = tuple[np.ndarray, np.ndarray, np.ndarray]


def rounded(x: np.ndarray, block_scaled: bool) -> Rounded:
    """Return q, block scales and scales of quantize_rows."""
    rows, spans = len(x), -(-x.shape[1] // 128)
    q, blocks = np.full((rows, spans * 128), 99, np.int8), np.full((rows, spans * 4), 99, np.int32)
    scales = np.full((rows, spans), np.nan, np.float32)
    args = [q, blocks, scales, x, x.shape[1]]
    interpreter.run(quantized.quantize_rows, (rows, spans), args, {"BLOCK_SCALED": block_scaled})
    return q, blocks, scales


@pytest.mark.parametrize("block_scaled", [False, True])
@pytest.mark.parametrize("inputs", [32, 100, 256, 300])
def test_quantize_rows(inputs: int, block_scaled: bool) -> None:
    x = activations(4, inputs)
    x[1, 3], x[2, inputs - 1] = np.nan, -np.inf
    x[3] *= np.float32(1e-38)  # the inverse of the scale overflows, or nearly
    q, blocks, scales = rounded(x, block_scaled)
    wanted_q, wanted_blocks, wanted_scales = numerics.quantize_rows(x, block_scaled)
    assert (q[:, :inputs] == wanted_q).all()
    assert (q[:, inputs:] == 0).all()
    assert np.array_equal(scales, wanted_scales, equal_nan=True)
    if block_scaled:
        finite = np.isfinite(wanted_scales).repeat(4, 1)[:, : wanted_blocks.shape[1]]
        assert (blocks[:, : wanted_blocks.shape[1]] == wanted_blocks)[finite].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 16, 128), (3, 40, 100), (17, 33, 300)])
def test_product_bit_for_bit(kind: str, rows: int, outputs: int, inputs: int) -> None:
    weight, x = weight_of(kind, outputs, inputs), activations(rows, inputs)
    wanted = weight.product(x)
    for block_m, block_n in ((16, 32), (32, 16)):
        assert (product(weight, x, block_m, block_n) == wanted).all()


def product(weight: Weight, x: np.ndarray, block_m: int = 16, block_n: int = 32) -> np.ndarray:
    own, (rows, outputs) = packing.packed(weight), (len(x), weight.shape[0])
    out = np.full((rows, outputs), np.nan, np.float32)
    ready = rounded(x, weight.storage.kind == "int8")
    args = [out, *ready, own.values, own.scales, own.channels, out, rows, outputs, own.spans]
    constants = {"KIND": weight.storage.kind, "BIAS": False, "BLOCK_M": block_m, "BLOCK_N": block_n}
    grid = product_grid(-(-rows // block_m), outputs, constants)
    interpreter.run(quantized.quantized_product, grid, args, constants)
    return out


def test_largest_sums_are_exact() -> None:
    """Every product has the largest magnitude: integer sums reach their bounds, below 2^31."""
    scales, channels = np.full((16, 4), 127, np.int8), np.ones(16, np.float32)
    int8 = Int8(np.full((16, 128), -128, np.int8), scales, channels)
    int4 = Int4(np.zeros((16, 64), np.uint8), scales, channels, 128)
    x = np.ones((2, 128), np.float32)
    for weight in (int8, int4):
        assert (product(weight, x) == weight.product(x)).all()


def test_a_row_that_is_not_finite_is_nan_alone() -> None:
    weight, x = weight_of("int8", 16, 128), activations(3, 128)
    x[1, 5] = np.inf
    found, wanted = product(weight, x), weight.product(x)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found, wanted, equal_nan=True)


def test_bias() -> None:
    weight, x = weight_of("int4", 20, 128), activations(5, 128)
    own, bias = packing.packed(weight), np.random.default_rng(5).standard_normal(20).astype("f4")
    out = np.empty((5, 20), np.float32)
    ready = rounded(x, weight.storage.kind == "int8")
    args = [out, *ready, own.values, own.scales, own.channels, bias, 5, 20, own.spans]
    constants = {"KIND": "int4", "BIAS": True, "BLOCK_M": 16, "BLOCK_N": 32}
    interpreter.run(quantized.quantized_product, (1, 1), args, constants)
    assert (out == weight.product(x) + bias).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gated_product(kind: str) -> None:
    gate, up = weight_of(kind, 20, 160, seed=2), weight_of(kind, 20, 160, seed=3)
    x, out = activations(5, 160) / np.float32(50), np.empty((5, 20), np.float32)
    parts = [array for w in map(packing.packed, (gate, up)) for array in (w.values, w.scales, w.channels)]
    args = [out, *rounded(x, kind == "int8"), *parts, 5, 20, 2]
    constants = {"KIND": kind, "BLOCK_M": 16, "BLOCK_N": 32}
    interpreter.run(quantized.quantized_gated_product, (1, 1), args, constants | {"ACTIVATION": "linear"})
    assert (out == gate.product(x) * up.product(x)).all()
    interpreter.run(quantized.quantized_gated_product, (1, 1), args, constants | {"ACTIVATION": "silu"})
    wanted = numerics.silu(gate.product(x)) * up.product(x)
    assert np.allclose(out, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [32, 100, 256])
def test_packed_shapes(kind: str, inputs: int) -> None:
    own = packing.packed(weight_of(kind, 20, inputs))
    arrays = (own.values, own.scales, own.channels)
    assert packing.packed_shapes(kind, (20, inputs)) == tuple((a.shape, a.dtype) for a in arrays)
