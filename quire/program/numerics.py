"""Reference implementations of sums, each in one order determined by a single row.

A BLAS selects its kernel, and thereby the order of a sum, by the number of rows: a row gives different bits
alone and in a batch. Here every product runs on tiles of a fixed number of rows, padded with zeros, so the
call is the same for one row and for 512, and the bits of a row do not depend on other rows.

With quantized weights the activations are quantized too: sums within a span are exact integers, whose order
does not matter, and the spans are added in sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from quire.program.program import Quantized

ROW_TILE = 8

Array = np.ndarray[Any, Any]  # float32


def matmul(x: Array, weight: Array | Quantized) -> Array:
    """Return x [T, in] times weight [out, in] transposed, [T, out]."""
    if not isinstance(weight, np.ndarray):
        return weight.product(x)
    rows, width = x.shape
    tiles = -(-rows // ROW_TILE)
    padded = np.zeros((tiles * ROW_TILE, width), np.float32)
    padded[:rows] = x
    product = np.matmul(padded.reshape(tiles, ROW_TILE, width), weight.T)
    return product.reshape(tiles * ROW_TILE, len(weight))[:rows]


GROUP = 32  # inputs of a quantized row that share an 8-bit block scale
SPAN = 128  # inputs of a quantized activation that share a float32 scale


def quantize_rows(x: Array, block_scaled: bool, span: int = SPAN) -> tuple[Array, Array, Array]:
    """Quantize x [T, in] as scale * block scale * q.

    Returns q [T, in], block scales [T, groups of 32] and scales [T, spans], all as float32: q are integers
    -127..127, block scales 0..127, or all 1 unless `block_scaled`. In each span amax is the largest
    |x|, steps = 127, or 127 * 127 if block_scaled; inverse = steps / amax and scale = amax / steps. The block
    scale of a group is b = ceil(top * (inverse / 127)), at most 127, where top is its largest |x|; and q =
    rint(x * (inverse / b)), ties to even. q is 0 if inverse is not finite (amax is 0 or tiny). The last span
    may be short. A span with an infinity or NaN has the scale NaN and q = 0, so that every result of it is
    NaN.
    """
    rows, width = x.shape
    spans = -(-width // span)
    padded = np.zeros((rows, spans * span), np.float32)
    padded[:, :width] = x
    padded = padded.reshape(rows, spans, span // GROUP, GROUP)
    tops = np.abs(padded).max(-1)
    amax = tops.max(-1)
    steps = np.float32(127 * 127 if block_scaled else 127)
    with np.errstate(all="ignore"):
        inverse = steps / amax
        usable = np.isfinite(inverse) & np.isfinite(amax)
        inverse = np.where(usable, inverse, np.float32(0))[..., None]
        block_scales = np.ceil(tops * (inverse / np.float32(127))) if block_scaled else np.ones_like(tops)
        block_scales = np.where(np.isfinite(tops), np.minimum(block_scales, np.float32(127)), np.float32(0))
        own = np.where(block_scales > 0, inverse / block_scales, np.float32(0))[..., None]
        q = np.where(own > 0, np.rint(padded * own), np.float32(0))
        scales = np.where(np.isfinite(amax), amax / steps, np.float32(np.nan))
    groups = -(-width // GROUP)
    per_group = block_scales.reshape(rows, spans * (span // GROUP))[:, :groups]
    return q.reshape(rows, spans * span)[:, :width], per_group, scales


def quantized_matmul(x: Array, q: Array, block_scales: Array, channels: Array, block_scaled: bool) -> Array:
    """Return x [T, in] times (channels * block_scales) * q [out, in] transposed, [T, out].

    q int8 [out, in], block_scales int8 [out, groups of 32], channels float32 [out]; x is quantized by rows
    (quantize_rows). For each span of 128 inputs, in order: s = the sum over its groups of block scale * dot,
    or, if `block_scaled` (for Int8 weights), of block scale * row block scale * floor((dot + 8) / 16), where
    dot is the group's sum of q * q_x: an exact integer below 2^31. acc = fma(float32(s), scale, acc), rounded
    once, where scale is that of the row, times 16 if dots were divided. The result is acc * channel.
    """
    rows, row_scales, scales = quantize_rows(x, block_scaled)
    total = np.zeros((len(x), len(q)), np.float32)
    for span in range(scales.shape[1]):
        first, last = span * SPAN, min((span + 1) * SPAN, x.shape[1])
        exact = np.zeros(total.shape)  # integers below 2^53: any order is exact
        for begin in range(first, last, GROUP):
            cut, group = slice(begin, min(begin + GROUP, last)), begin // GROUP
            dots = np.matmul(rows[:, cut].astype(np.float64), q[:, cut].T.astype(np.float64))
            if block_scaled:
                dots = np.floor((dots + 8) / 16) * row_scales[:, group, None]
            exact += dots * block_scales[:, group]
        scale = scales[:, span, None] * np.float32(16 if block_scaled else 1)
        total = fma(exact.astype(np.float32), scale, total)
    return total * channels


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32 arrays, rounded once to float32, like the instruction (normal results).

    The product is exact in float64. If the sum, rounded to float64, is exactly halfway between two float32
    numbers, the part lost in that rounding decides which of them is nearer.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are valid results
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
    with np.errstate(over="ignore"):  # exp overflows to infinity for very negative x: the limit is correct
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    """Return the tanh approximation of gelu (Hendrycks and Gimpel, arXiv:1606.08415)."""
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + np.tanh(inner))


def gelu(x: Array) -> Array:
    """Return x times the probability that a normal variable is less (arXiv:1606.08415)."""
    below = [0.5 * math.erfc(value) for value in (x.astype(np.float64) * -math.sqrt(0.5)).ravel().tolist()]
    return x * np.array(below, np.float32).reshape(x.shape)


def tanh(x: Array) -> Array:
    return np.tanh(x)


def relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0.0))


def relu2(x: Array) -> Array:
    """Return the square of relu (arXiv:2109.08668)."""
    return relu(x) * relu(x)


def linear(x: Array) -> Array:
    """Return x: as the gate of another value, their product."""
    return x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": linear,
    "sigmoid": sigmoid,
    "relu2": relu2,
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "tanh": tanh,
}
