"""The sums of the reference, each in one order that depends on a single row alone.

A BLAS picks its kernel, and with it the order of a sum, by the number of rows: the same row gives other
bits alone than in a batch. Here every product runs on tiles of a fixed number of rows, padded with
zeros, so the call is the same for one row or for 512, and a row's bits do not depend on its company.

With quantized weights the row is quantized too: sums within a group are of exact integers, which have no
order, and the groups are added one after the other. How many inputs a group has depends on the weights' kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from quire.program.program import Quantized

ROW_TILE = 16

Array = np.ndarray[Any, Any]  # float32


def matmul(x: Array, weight: Array | Quantized) -> Array:
    """x [T, in] times weight [out, in] transposed, [T, out]."""
    if not isinstance(weight, np.ndarray):
        return weight.product(x)
    rows, width = x.shape
    tiles = -(-rows // ROW_TILE)
    padded = np.zeros((tiles * ROW_TILE, width), np.float32)
    padded[:rows] = x
    product = np.matmul(padded.reshape(tiles, ROW_TILE, width), weight.T)
    return product.reshape(tiles * ROW_TILE, len(weight))[:rows]


def quantize_rows(x: Array, activation_group: int) -> tuple[Array, Array]:
    """x [T, in] -> (q [T, in], integers -127..127 as float32; scales [T, groups of activation_group]).

    In each group amax is the largest |x|, scale = amax / 127 and q = rint(x * (127 / amax)), ties to even;
    q is 0 where 127 / amax is not finite (amax is 0, or under 2^-121). The last group may be short. A group
    that holds an infinity or NaN has the scale NaN and q = 0, so that whatever is made of it is NaN.
    """
    rows, width = x.shape
    groups = -(-width // activation_group)
    padded = np.zeros((rows, groups * activation_group), np.float32)
    padded[:, :width] = x
    padded = padded.reshape(rows, groups, activation_group)
    amax = np.abs(padded).max(-1)
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / amax
        usable = np.isfinite(inverse) & np.isfinite(amax)
        q = np.where(usable[..., None], np.rint(padded * inverse[..., None]), np.float32(0))
        scales = np.where(np.isfinite(amax), amax / np.float32(127), np.float32(np.nan))
    return q.reshape(rows, groups * activation_group)[:, :width], scales


def quantized_matmul(
    x: Array, q: Array, codes: Array, channels: Array, group_size: int, activation_group: int
) -> Array:
    """x [T, in] times (channels * codes) * q [out, in] transposed, [T, out], with x quantized by rows.

    q int8 [out, in], codes int8 [out, groups of group_size], channels float32 [out]. For each group of
    `activation_group` inputs in order: s = the sum over its inputs k of code * q * q_x, an exact integer
    (below 2^26 for Int8, 2^24 for Int4); acc = fma(float32(s), scale_x, acc), rounded once. The result is
    acc * channel.
    """
    rows, scales = quantize_rows(x, activation_group)
    spread = np.repeat(codes, group_size, axis=-1)
    total = np.zeros((len(x), len(q)), np.float32)
    for group in range(scales.shape[1]):
        cut = slice(group * activation_group, min((group + 1) * activation_group, x.shape[1]))
        wide = np.multiply(q[:, cut], spread[:, cut], dtype=np.float64)
        exact = np.matmul(rows[:, cut].astype(np.float64), wide.T)  # integers below 2^53: any order is exact
        total = fma(exact.astype(np.float32), scales[:, group, None], total)
    return total * channels


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays, rounded once to float32, as the instruction does (normal results).

    The product is exact in float64. Where the sum, rounded to float64, lies just halfway between two
    float32 numbers, the part lost in that rounding decides which of them is nearer.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are results like others
        product = a.astype(np.float64) * b
        total = np.asarray(product + c)
        halfway = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        if halfway.any():
            t, p = total[halfway], product[halfway]
            back = t - p
            lost = (p - (t - back)) + (np.broadcast_to(c, total.shape)[halfway] - back)
            total[halfway] = np.where(lost == 0, t, np.nextafter(t, np.copysign(np.inf, lost)))
        return total.astype(np.float32)


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
