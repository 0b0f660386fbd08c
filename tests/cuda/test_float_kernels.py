"""Kernels of float values in Triton's interpreter, against the NumPy references of their ops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.backends.cuda import interpreter, packing
from quire.backends.cuda.kernels import embedding, norms, products
from quire.backends.cuda.launch_list import product_grid
from quire.program.numerics import ACTIVATIONS
from quire.quantize.integers import Int4, Int8, pack

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found: np.ndarray, wanted: np.ndarray, most: float) -> bool:
    """Return whether the largest difference is within `most` of the largest number wanted."""
    apart = np.abs(found.astype(np.float64) - wanted).max()
    return bool(apart <= most * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_gather_rows(dtype: np.dtype[Any]) -> None:
    table, rows = normal(0, 7, 70).astype(dtype), np.array([3, 0, 6, 7, 3], np.int32)
    out = np.empty((5, 70), np.float32)
    interpreter.run(embedding.gather_rows, (5, 2), [out, rows, table, 7, 70], {"BLOCK": 64})
    wanted = table[[3, 0, 6, 0, 3]].astype(np.float32)  # row 7 is beyond the table
    assert (out == wanted).all()


def test_gather_states() -> None:
    states, rows = normal(0, 4, 70), np.array([3, 0, 3], np.int32)
    out = np.empty((3, 70), np.float32)
    interpreter.run(embedding.gather_states, (3, 2), [out, rows, states, 70], {"BLOCK": 64})
    assert (out == states[rows].astype(BF16).astype(np.float32)).all()


def test_gather_quantized_rows() -> None:
    rng = np.random.default_rng(1)
    scales = rng.integers(1, 128, (6, 3)).astype(np.int8)
    channels = rng.random(6).astype(np.float32)
    int8 = Int8(rng.integers(-128, 128, (6, 90)).astype(np.int8), scales, channels)
    int4 = Int4(pack(rng.integers(0, 16, (6, 90))), scales, channels, 90)
    ids, out = np.array([5, 0, 2], np.int32), np.empty((3, 90), np.float32)
    for kernel, weight in ((embedding.gather_int8_rows, int8), (embedding.gather_int4_rows, int4)):
        out[:], own = np.nan, packing.packed(weight)
        args = [out, ids, own.values, own.scales, own.channels, 6, 90]
        interpreter.run(kernel, (3, 2), args, {"BLOCK": 64})
        assert (out == weight.rows(ids)).all()


@pytest.mark.parametrize("width", [64, 100, 257])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(width: int, add: bool) -> None:
    x, y, weight = normal(0, 3, width), normal(1, 3, width), normal(2, width).astype(BF16)
    out, total = np.empty_like(x), np.empty_like(x)
    interpreter.run(
        norms.rms_norm,
        (3,),
        [out, total, x, y, weight, width, 1e-5, 1.0],
        {"ADD": add, "WEIGHT": True, "BLOCK": 128},
    )
    s = x + y if add else x
    wanted = s / np.sqrt(np.mean(s * s, -1, keepdims=True) + np.float32(1e-5)) * (weight.astype("f4") + 1)
    assert not add or (total == s).all()
    assert close(out, wanted, 1e-6)


@pytest.mark.parametrize("add", [False, True])
def test_layer_norm(add: bool) -> None:
    x, y, weight, bias = normal(0, 3, 100), normal(1, 3, 100), normal(2, 100), normal(3, 100)
    out, total = np.empty_like(x), np.empty_like(x)
    constants = {"ADD": add, "WEIGHT": True, "BIAS": True, "BLOCK": 64}
    interpreter.run(norms.layer_norm, (3,), [out, total, x, y, weight, bias, 100, 1e-5], constants)
    s = x + y if add else x
    apart = s - s.mean(-1, keepdims=True)
    wanted = apart / np.sqrt(np.mean(apart * apart, -1, keepdims=True) + np.float32(1e-5)) * weight + bias
    assert close(out, wanted, 1e-6)


def multiplied(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the product of operands in the format of the weights, summed in float64."""
    narrow = x.astype(weight.dtype) if weight.dtype == BF16 else x
    return narrow.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize(("dtype", "precision"), [(BF16, "stored"), (F16, "tf32"), (F32, "ieee")], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 16, 32), (3, 40, 72), (17, 33, 100)])
def test_product(dtype: np.dtype[Any], precision: str, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = normal(0, rows, inputs), normal(1, outputs, inputs).astype(dtype), normal(2, outputs)
    out = np.empty((rows, outputs), np.float32)
    args = [out, x, weight, bias, rows, outputs, inputs]
    constants = {"BIAS": True, "PRECISION": precision}
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    grid = product_grid(-(-rows // 16), outputs, tile)
    interpreter.run(products.product, grid, args, constants | tile)
    assert close(out, multiplied(x, weight) + bias, 1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "linear"])
def test_gated_product(activation: str) -> None:
    x, gate, up = normal(0, 5, 72), normal(1, 40, 72).astype(BF16), normal(2, 40, 72).astype(BF16)
    out = np.empty((5, 40), np.float32)
    constants = {"ACTIVATION": activation, "PRECISION": "stored", "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    interpreter.run(products.gated_product, (1, 2), [out, x, gate, up, 5, 40, 72], constants)
    name = activation.replace("gelu_tanh", "gelu_new")
    wanted = ACTIVATIONS[name](multiplied(x, gate).astype(np.float32)) * multiplied(x, up)
    assert close(out, wanted, 2e-6)


def test_tiles_do_not_change_bits() -> None:
    """As far as the interpreter can tell: the order of sums within a product is that of a GPU only on one."""
    x, weight = normal(0, 20, 96), normal(1, 48, 96).astype(BF16)
    found = []
    for block_m, block_n in ((16, 16), (32, 64), (64, 32)):
        out = np.empty((20, 48), np.float32)
        args = [out, x, weight, weight, 20, 48, 96]
        constants = {"BIAS": False, "PRECISION": "stored", "BLOCK_K": 32}
        grid = product_grid(-(-20 // block_m), 48, {"BLOCK_N": block_n})
        interpreter.run(products.product, grid, args, constants | {"BLOCK_M": block_m, "BLOCK_N": block_n})
        found.append(out)
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
