"""Adapters (LoRA): up (scale * (down x)), by the adapter of each row, is added to a product.

The inputs are summed in segments of 512, one accumulator each, and segments in their order. So the sums of a
row depend on its inputs and its adapter alone, not on the rows and adapters beside it.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.products import _multiply
from quire.backends.cuda.kernels.variants import ADAPTER_RANKS, ADAPTER_SEGMENT

SEGMENT, RANKS = tl.constexpr(ADAPTER_SEGMENT), tl.constexpr(ADAPTER_RANKS)


@triton.jit
def _rows(adapters, tokens, tile_tokens, BLOCK_M: tl.constexpr):
    """Return the rows of this program, their adapters (-1: none), and the first and last number of these."""
    lane = tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * tile_tokens + lane
    adapter = tl.load(adapters + row, mask=(row < tokens) & (lane < tile_tokens), other=-1)
    return row, adapter, tl.min(tl.where(adapter >= 0, adapter, 2147483647), 0), tl.max(adapter, 0)


@triton.jit
def _matrix(address, PRECISION: tl.constexpr):
    """Return an address as a pointer to bfloat16 ("stored"), float16 ("tf32") or float32 ("ieee")."""
    if PRECISION == "stored":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif PRECISION == "tf32":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def adapter_down(
    partial,
    x,
    adapters,
    table,
    tokens,
    tile_tokens,
    inputs,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial[t, s] = the product of segment s of x[t] with `down` of the adapter of row t, RANKS numbers.

    x [T, inputs]; partial [T, segments, RANKS] float32; adapters [T] int32, -1 for none; table [adapters, 3]
    int64 has the addresses of down [rank, inputs] and of up, and the rank: 0 for one that adds nothing, or is
    of another format. Rows without an adapter are not written. Grid (segments, T / tile_tokens), tile_tokens
    at most BLOCK_M. 2 * T * inputs * rank operations; a program reads a segment of each of its adapters once.
    PRECISION is that of `product`.
    """
    row, adapter, first, last = _rows(adapters, tokens, tile_tokens, BLOCK_M)
    rank_at, k = tl.arange(0, RANKS), tl.arange(0, BLOCK_K)
    begin = tl.program_id(0) * SEGMENT
    x_at = x + row[:, None].to(tl.int64) * inputs + k[None, :]
    sums = tl.zeros((BLOCK_M, RANKS), tl.float32)
    for this in range(first, last + 1):
        mine, rank = adapter == this, tl.load(table + this * 3 + 2)
        if (tl.max(mine.to(tl.int32), 0) > 0) & (rank > 0):
            w_at = _matrix(tl.load(table + this * 3), PRECISION) + rank_at[:, None] * inputs + k[None, :]
            own = tl.zeros((BLOCK_M, RANKS), tl.float32)
            for at in range(begin, tl.minimum(begin + SEGMENT, inputs), BLOCK_K):
                k_in = at + k < inputs
                a = tl.load(x_at + at, mask=mine[:, None] & k_in[None, :], other=0.0)
                w = tl.load(w_at + at, mask=(rank_at < rank)[:, None] & k_in[None, :], other=0.0)
                own = _multiply(a, w, own, PRECISION)
            sums = tl.where(mine[:, None], own, sums)
    place = row[:, None].to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial + place * RANKS + rank_at[None, :], sums, mask=(adapter >= 0)[:, None])


@triton.jit
def adapter_up(
    out,
    partial,
    adapters,
    table,
    scales,
    tokens,
    tile_tokens,
    segments,
    outputs,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] += up (scale * the sum of partial[t] over its segments), in place: out [T, outputs] float32.

    `up` of each adapter is stored as [rank, outputs padded to a multiple of 16]; scales [adapters] float32;
    the rest as in adapter_down. Rows of other adapters than those of the format are left as they are. Grid
    (outputs / BLOCK_N, T / tile_tokens). 2 * T * rank * outputs operations.
    """
    row, adapter, first, last = _rows(adapters, tokens, tile_tokens, BLOCK_M)
    rank_at, n = tl.arange(0, RANKS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    stride, n_in = tl.cdiv(outputs, 16) * 16, n < outputs
    for this in range(first, last + 1):
        mine, rank = adapter == this, tl.load(table + this * 3 + 2)
        if (tl.max(mine.to(tl.int32), 0) > 0) & (rank > 0):
            hidden = tl.zeros((BLOCK_M, RANKS), tl.float32)
            for segment in range(segments):
                at = (row[:, None].to(tl.int64) * segments + segment) * RANKS + rank_at[None, :]
                hidden += tl.load(partial + at, mask=mine[:, None], other=0.0)
            hidden *= tl.load(scales + this)
            w_at = _matrix(tl.load(table + this * 3 + 1), PRECISION) + rank_at[None, :] * stride + n[:, None]
            w = tl.load(w_at, mask=(rank_at < rank)[None, :] & n_in[:, None], other=0.0)
            own = _multiply(hidden, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            inside = mine[:, None] & n_in[None, :]
            at = out + row[:, None].to(tl.int64) * outputs + n[None, :]
            tl.store(at, tl.load(at, mask=inside, other=0.0) + own, mask=inside)
