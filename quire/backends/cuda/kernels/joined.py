"""Products of one value and up to three weights as one launch: queries, keys and values of few tokens.

The matrices of keys and values are too small to keep a GPU busy by themselves. Programs are those of the
products one after the other, and do what theirs do, so bits are the same. A weight that is missing has no
outputs.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.products import _multiply, _tile
from quire.backends.cuda.kernels.quantized import _rows_of, row_length
from quire.backends.cuda.kernels.tiles import read_ahead, row_tile


@triton.jit
def _own(which, of_0, of_1, of_2):
    """Return what the product of a program has."""
    return tl.where(which == 0, of_0, tl.where(which == 1, of_1, of_2))


@triton.jit
def _place(outputs_0, outputs_1, outputs_2, BLOCK_N: tl.constexpr):
    """Return the product of a program, its number of outputs, and the first of those of the program."""
    tile, first, second = tl.program_id(1), tl.cdiv(outputs_0, BLOCK_N), tl.cdiv(outputs_1, BLOCK_N)
    which = (tile >= first).to(tl.int32) + (tile >= first + second).to(tl.int32)
    own = tile - _own(which, 0, first, first + second)
    return which, _own(which, outputs_0, outputs_1, outputs_2), own * BLOCK_N


@triton.jit
def _store(out, acc, bias, m, n, rows, outputs, BIAS: tl.constexpr):
    inside = n < outputs
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out + at, acc, mask=(m < rows)[:, None] & inside[None, :])


@triton.jit
def joined_product(
    out_0,
    out_1,
    out_2,
    x,
    weight_0,
    bias_0,
    weight_1,
    bias_1,
    weight_2,
    bias_2,
    rows,
    outputs_0,
    outputs_1,
    outputs_2,
    inputs,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr = 0,
):
    """out_i [rows, outputs_i] = x weight_i^T (+ bias_i), as `product`. Grid of row_tile, with all outputs."""
    which, outputs, n = _place(outputs_0, outputs_1, outputs_2, BLOCK_N)
    weight, m = _own(which, weight_0, weight_1, weight_2), row_tile() * BLOCK_M
    read_ahead(weight, n, outputs, inputs, BLOCK_N, AHEAD)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        a = _tile(x, m, begin, rows, inputs, False, BLOCK_M, BLOCK_K)
        w = _tile(weight, n, begin, outputs, inputs, False, BLOCK_N, BLOCK_K)
        acc = _multiply(a, w, acc, PRECISION)
    out, bias = _own(which, out_0, out_1, out_2), _own(which, bias_0, bias_1, bias_2)
    _store(out, acc, bias, m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N), rows, outputs, BIAS)


@triton.jit
def joined_quantized_product(
    out_0,
    out_1,
    out_2,
    x,
    x_blocks,
    x_scales,
    weight_0,
    scales_0,
    channels_0,
    bias_0,
    weight_1,
    scales_1,
    channels_1,
    bias_1,
    weight_2,
    scales_2,
    channels_2,
    bias_2,
    rows,
    outputs_0,
    outputs_1,
    outputs_2,
    spans,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
    AHEAD: tl.constexpr = 0,
):
    """out_i [rows, outputs_i] = quantized x weight_i^T (+ bias_i), as `quantized_product`. Grid as above."""
    which, outputs, first = _place(outputs_0, outputs_1, outputs_2, BLOCK_N)
    weight, scales = _own(which, weight_0, weight_1, weight_2), _own(which, scales_0, scales_1, scales_2)
    read_ahead(weight, first, outputs, row_length(spans, KIND), BLOCK_N, AHEAD)
    channels = _own(which, channels_0, channels_1, channels_2)
    m, n = row_tile() * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    acc = _rows_of(
        *(x, x_blocks, x_scales, weight, scales, channels, m, n, m < rows, n < outputs, outputs, spans),
        *(KIND, BLOCK_M, BLOCK_N, STAGES),
    )
    out, bias = _own(which, out_0, out_1, out_2), _own(which, bias_0, bias_1, bias_2)
    _store(out, acc, bias, m, n, rows, outputs, BIAS)
