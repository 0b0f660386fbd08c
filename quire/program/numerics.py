"""The sums of the reference, each in one order that depends on a single row alone.

A BLAS picks its kernel, and with it the order of a sum, by the number of rows: the same row gives other
bits alone than in a batch. Here every product runs on tiles of a fixed number of rows, padded with
zeros, so the call is the same for one row or for 512, and a row's bits do not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

ROW_TILE = 16

Array = np.ndarray[Any, Any]  # float32


def matmul(x: Array, weight: Array) -> Array:
    """x [T, in] times weight [out, in] transposed, [T, out]."""
    rows, width = x.shape
    tiles = -(-rows // ROW_TILE)
    padded = np.zeros((tiles * ROW_TILE, width), np.float32)
    padded[:rows] = x
    product = np.matmul(padded.reshape(tiles, ROW_TILE, width), weight.T)
    return product.reshape(tiles * ROW_TILE, len(weight))[:rows]


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp overflows to infinity for very negative x: the limit is right
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of gelu (Hendrycks and Gimpel, arXiv:1606.08415)."""
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + np.tanh(inner))


def relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0.0))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "swish": silu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
}
