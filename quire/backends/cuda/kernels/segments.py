"""Attention of few tokens with long contexts: a program computes a segment, another merges them.

A list on the device says which segments there are, so a captured graph serves every context.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.attention import (
    SEGMENT,
    _merge,
    _narrow,
    _seen_range,
    _segment,
    _sinks,
)


@triton.jit
def list_segments(items, firsts, positions, tokens, window, chunked, BLOCK: tl.constexpr):
    """List the segments that each token sees: items int32 [n, 2] = (token, segment), those of a token in
    order.

    firsts int32 [T + 1] are the numbers of the items of each token; the last is n. Grid (1,), T <= BLOCK.
    The sums are of integers.
    """
    token = tl.arange(0, BLOCK)
    inside = token < tokens
    position = tl.load(positions + token, mask=inside, other=0)
    oldest, newest = _seen_range(position, window, chunked)
    count = tl.where(inside, newest // SEGMENT - oldest // SEGMENT + 1, 0)
    first = tl.cumsum(count, 0) - count
    tl.store(firsts + token, first, mask=inside)
    tl.store(firsts + tokens, tl.sum(count, 0))
    for i in range(tl.max(count, 0)):
        listed = i < count
        tl.store(items + 2 * (first + i), token, mask=listed)
        tl.store(items + 2 * (first + i) + 1, oldest // SEGMENT + i, mask=listed)


@triton.jit
def attend_segments(
    partial,
    stats,
    items,
    firsts,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    positions,
    token_rows,
    tables,
    table_stride,
    tokens,
    heads,
    groups,
    dim,
    value_dim,
    block_size,
    window,
    chunked,
    scale,
    softcap,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Compute each listed segment: partial [items, heads, value_dim] and stats [items, heads, 2] float32.

    stats are peak and total. Arguments as in `attend`, one token a program. Grid (any number, groups): a
    program takes every n-th item, which changes nothing in what an item is. Reads the segment's keys and
    values once.
    """
    group, lane = tl.program_id(1), tl.arange(0, BLOCK_M)
    shared = heads // groups
    head, inside = group * shared + lane, lane < shared
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    for item in range(tl.program_id(0), tl.load(firsts + tokens), tl.num_programs(0)):
        token, segment = tl.load(items + 2 * item).to(tl.int64), tl.load(items + 2 * item + 1)
        position = tl.load(positions + token) + tl.zeros((BLOCK_M,), tl.int32)
        oldest, newest = _seen_range(position, window, chunked)
        q_at = q + (token * heads + head)[:, None] * dim + d[None, :]
        own_q = tl.load(q_at, mask=inside[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
        table = tables + tl.load(token_rows + token).to(tl.int64) * table_stride
        peak, total, mixed = _segment(
            _narrow(own_q, PRECISION),
            segment,
            oldest,
            newest,
            (table, block_size),
            (keys, values, key_scales, value_scales),
            (groups, group, dim, value_dim),
            scale,
            softcap,
            CAP,
            SCALED,
            PRECISION,
            DIM,
            VALUE_DIM,
        )
        at = (item + tl.zeros_like(head).to(tl.int64)) * heads + head
        tl.store(stats + 2 * at, peak, mask=inside)
        tl.store(stats + 2 * at + 1, total, mask=inside)
        to = partial + at[:, None] * value_dim + e[None, :]
        tl.store(to, mixed, mask=inside[:, None] & (e < value_dim)[None, :])


@triton.jit
def merge_segments(out, partial, stats, firsts, sinks, heads, value_dim, has_sinks, VALUE_DIM: tl.constexpr):
    """out [T, heads, value_dim] = the segments of each token merged in order, as `attend` does. Grid (T,
    heads).
    """
    token, e = tl.program_id(0), tl.arange(0, VALUE_DIM)
    head = tl.program_id(1) + tl.zeros((1,), tl.int32)
    inside = (e < value_dim)[None, :]
    peak, total = _sinks(sinks, head, head < heads, has_sinks)
    mixed = tl.zeros((1, VALUE_DIM), tl.float32)
    for item in range(tl.load(firsts + token), tl.load(firsts + token + 1)):
        at = (item + tl.zeros_like(head).to(tl.int64)) * heads + head
        own = tl.load(partial + at[:, None] * value_dim + e[None, :], mask=inside, other=0.0)
        own_peak, own_total = tl.load(stats + 2 * at), tl.load(stats + 2 * at + 1)
        peak, total, mixed = _merge(peak, total, mixed, own_peak, own_total, own)
    mixed = tl.div_rn(mixed, tl.where(total == 0, 1.0, total)[:, None])
    at = (token.to(tl.int64) * heads + head)[:, None] * value_dim + e[None, :]
    tl.store(out + at, mixed, mask=inside)
