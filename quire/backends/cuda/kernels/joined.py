"""Small products of one value and up to three weights as one launch: queries, keys and values of a token.

The matrices of keys and values are too small to keep a GPU busy by themselves. Programs are those of the
products one after the other, and do what theirs do, so bits are the same. A weight that is missing has no
outputs.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.products import _multiply, _tile
from quire.backends.cuda.kernels.quantized import _rows_of
from quire.backends.cuda.kernels.tiles import row_tile


@triton.jit
def _store(out, acc, bias, m, n, rows, outputs, BIAS: tl.constexpr):
    inside = n < outputs
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out + at, acc, mask=(m < rows)[:, None] & inside[None, :])


@triton.jit
def _floats(
    out,
    x,
    weight,
    bias,
    tile,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute a tile of outputs as `product`."""
    m, n = row_tile() * BM, tile * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, inputs, BK):
        a = _tile(x, m, begin, rows, inputs, False, BM, BK)
        w = _tile(weight, n, begin, outputs, inputs, False, BN, BK)
        acc = _multiply(a, w, acc, PRECISION)
    _store(out, acc, bias, m + tl.arange(0, BM), n + tl.arange(0, BN), rows, outputs, BIAS)


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
):
    """out_i [rows, outputs_i] = x weight_i^T (+ bias_i), as `product`. Grid of row_tile, with all outputs."""
    tile, how = tl.program_id(1), (BIAS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    first, second = tl.cdiv(outputs_0, BLOCK_N), tl.cdiv(outputs_1, BLOCK_N)
    if tile < first:
        _floats(out_0, x, weight_0, bias_0, tile, rows, outputs_0, inputs, *how)
    elif tile < first + second:
        _floats(out_1, x, weight_1, bias_1, tile - first, rows, outputs_1, inputs, *how)
    else:
        _floats(out_2, x, weight_2, bias_2, tile - first - second, rows, outputs_2, inputs, *how)


@triton.jit
def _integers(
    out,
    x,
    weight,
    bias,
    tile,
    rows,
    outputs,
    spans,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile of outputs as `quantized_product`."""
    m, n = row_tile() * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    acc = _rows_of(*x, *weight, m, n, m < rows, n < outputs, outputs, spans, KIND, BM, BN, STAGES)
    _store(out, acc, bias, m, n, rows, outputs, BIAS)


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
):
    """out_i [rows, outputs_i] = quantized x weight_i^T (+ bias_i), as `quantized_product`. Grid as above."""
    tile, how = tl.program_id(1), (BIAS, KIND, BLOCK_M, BLOCK_N, STAGES)
    first, second = tl.cdiv(outputs_0, BLOCK_N), tl.cdiv(outputs_1, BLOCK_N)
    rounded = (x, x_blocks, x_scales)
    if tile < first:
        weight = (weight_0, scales_0, channels_0)
        _integers(out_0, rounded, weight, bias_0, tile, rows, outputs_0, spans, *how)
    elif tile < first + second:
        weight = (weight_1, scales_1, channels_1)
        _integers(out_1, rounded, weight, bias_1, tile - first, rows, outputs_1, spans, *how)
    else:
        weight = (weight_2, scales_2, channels_2)
        _integers(out_2, rounded, weight, bias_2, tile - first - second, rows, outputs_2, spans, *how)
