"""Products of experts: the rows of each expert, sorted by it, times its own matrix.

A program finds its expert and rows from the offsets of sort_by_expert, so the grid depends on the numbers of
pairs and experts alone. Sums are those of `product` and `quantized_product`: a row does not depend on others
of its expert. Where not said otherwise, out is [pairs, outputs] and a row is that of a pair, in order of
pairs; x is by token (pair // chosen), or by pair if chosen is 1. Grid of row_tile, with pairs / BLOCK_M +
experts tiles of rows.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import gated
from quire.backends.cuda.kernels.products import _multiply
from quire.backends.cuda.kernels.quantized import _rows_of
from quire.backends.cuda.kernels.tiles import padded, row_tile


@triton.jit
def _rows(order, offsets, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of this program, experts if none is left, its pairs, and which of them there are."""
    e = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + e, mask=e < experts, other=0)
    end = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    tile = row_tile()
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (e < experts)).to(tl.int32), 0)
    first = tl.sum(tl.where(e < expert, tiles, 0), 0)
    row = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < tl.sum(tl.where(e == expert, end, 0), 0)
    return expert, tl.load(order + row, mask=inside, other=0), inside


@triton.jit
def _float_rows(
    x,
    weight,
    m,
    n,
    m_in,
    n_in,
    inputs,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Return rows m of x times outputs n of a matrix, as `product`."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    x_at = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    w_at = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    for begin in range(0, inputs, BK):
        k_in = begin + k < inputs
        a = tl.load(x_at + begin, mask=m_in[:, None] & k_in[None, :], other=0.0)
        w = tl.load(w_at + begin, mask=n_in[:, None] & k_in[None, :], other=0.0)
        acc = _multiply(a, w, acc, PRECISION)
    return acc


@triton.jit
def grouped_product(
    out,
    x,
    order,
    offsets,
    weight,
    bias,
    outputs,
    inputs,
    experts,
    chosen,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = x weight[expert]^T (+ bias[expert]): weight [experts, outputs, inputs], bias [experts,
    outputs].
    """
    expert, pair, inside = _rows(order, offsets, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in, m, own = n < outputs, pair // chosen, expert.to(tl.int64) * outputs
        acc = _float_rows(
            x, weight + own * inputs, m, n, inside, n_in, inputs, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if BIAS:
            acc += tl.load(bias + own + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        at = out + pair[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(at, acc, mask=inside[:, None] & n_in[None, :])


@triton.jit
def grouped_gated_product(
    out,
    x,
    order,
    offsets,
    gate,
    up,
    gate_bias,
    up_bias,
    outputs,
    inputs,
    experts,
    chosen,
    limit,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = activation(x gate[expert]^T) * (x up[expert]^T), biases before it: gate, up [experts, outputs,
    inputs].
    """
    expert, pair, inside = _rows(order, offsets, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in, m, own = n < outputs, pair // chosen, expert.to(tl.int64) * outputs
        own_gate = _float_rows(
            x, gate + own * inputs, m, n, inside, n_in, inputs, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        acc = _float_rows(
            x, up + own * inputs, m, n, inside, n_in, inputs, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if BIAS:
            own_gate += tl.load(gate_bias + own + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
            acc += tl.load(up_bias + own + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        at = out + pair[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(at, gated(own_gate, acc, limit, ACTIVATION), mask=inside[:, None] & n_in[None, :])


@triton.jit
def grouped_quantized_product(
    out,
    x,
    x_blocks,
    x_scales,
    order,
    offsets,
    weight,
    block_scales,
    channels,
    bias,
    outputs,
    spans,
    experts,
    chosen,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
):
    """The same of quantized x and packed weights of all experts (packing.PackedIntegers), bit for bit."""
    expert, pair, inside = _rows(order, offsets, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in, own = n < outputs, expert.to(tl.int64) * outputs
        row_bytes = spans * 128 if KIND == "int8" else spans * 64
        acc = _rows_of(
            x,
            x_blocks,
            x_scales,
            weight + own * row_bytes,
            block_scales + expert.to(tl.int64) * padded(outputs) * (spans * 4),
            channels + own,
            pair // chosen,
            n,
            inside,
            n_in,
            outputs,
            spans,
            KIND,
            BLOCK_M,
            BLOCK_N,
            STAGES,
        )
        if BIAS:
            acc += tl.load(bias + own + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        at = out + pair[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(at, acc, mask=inside[:, None] & n_in[None, :])
