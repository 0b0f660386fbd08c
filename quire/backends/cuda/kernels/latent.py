"""Attention over cached latents, which all heads share (ops.LatentAttention), and lists of pairs by head.

Partitions, segments and their sums are those of attention.py. So the sums of a token depend on its position
alone, whether a program computes all segments of its rows (`attend_latent`) or one segment each
(`attend_latent_segments`, then `merge_segments`). A row is a pair of a token and a head.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.attention import (
    PARTITION,
    SEGMENT,
    _dot,
    _finite,
    _merge,
    _narrow,
    _sums,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def list_by_head(order, offsets, tokens, heads, BLOCK: tl.constexpr):
    """List the pairs of a token and a head by head, for grouped products: order [tokens * heads] has the
    number of a pair, token * heads + head, and offsets [heads + 1] where those of each head begin.

    Grid (max(tokens * heads, heads + 1) / BLOCK,).
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(order + entry, entry % tokens * heads + entry // tokens, mask=entry < tokens * heads)
    tl.store(offsets + entry, entry * tokens, mask=entry <= heads)


@triton.jit
def _queries(q, q_rope, row, inside, sizes, PRECISION: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr):
    """Return the queries of rows: those that meet latents, and those that meet their rotated parts."""
    dim, value_dim = sizes
    d, e = tl.arange(0, ROPE), tl.arange(0, RANK)
    at = row[:, None] * value_dim + e[None, :]
    of_c = tl.load(q + at, mask=inside[:, None] & (e < value_dim)[None, :], other=0.0)
    at = row[:, None] * dim + d[None, :]
    of_r = tl.load(q_rope + at, mask=inside[:, None] & (d < dim)[None, :], other=0.0)
    return _narrow(of_c, PRECISION), _narrow(of_r, PRECISION)


@triton.jit
def _segment(
    queries,
    segment,
    newest,
    places,
    cache,
    sizes,
    scale,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Return peak, total and mixed of a segment. newest [rows] are the last positions that rows see, or -1.

    places = (table of the row, block size), cache = (ropes, latents, their scales).
    """
    of_c, of_r = queries
    table, block_size = places
    ropes, latents, rope_scales, latent_scales = cache
    dim, value_dim = sizes
    rows: tl.constexpr = of_c.shape[0]
    last = tl.max(newest, 0)
    d, e = tl.arange(0, ROPE), tl.arange(0, RANK)
    peak, total = tl.full((rows,), float("-inf"), tl.float32), tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, RANK), tl.float32)
    for start in range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, last + 1), PARTITION):
        at = start + tl.arange(0, PARTITION)
        held = at <= last
        block = tl.load(table + at // block_size, mask=held, other=0)
        place = (block * block_size + at % block_size).to(tl.int64)
        c_in, r_in = held[:, None] & (e < value_dim)[None, :], held[:, None] & (d < dim)[None, :]
        c = _narrow(tl.load(latents + place[:, None] * value_dim + e[None, :], mask=c_in, other=0), PRECISION)
        r = _narrow(tl.load(ropes + place[:, None] * dim + d[None, :], mask=r_in, other=0), PRECISION)
        scores, turned = _dot(of_c, tl.trans(c), PRECISION), _dot(of_r, tl.trans(r), PRECISION)
        if SCALED:
            latent_scale = tl.load(latent_scales + place, mask=held, other=0.0)[None, :]
            scores *= latent_scale
            turned *= tl.load(rope_scales + place, mask=held, other=0.0)[None, :]
        scores = (scores + turned) * scale * _LOG2_E
        scores = tl.where(at[None, :] <= newest[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - _finite(higher)[:, None])
        keep = tl.exp2(peak - _finite(higher))
        total = total * keep + _sums(weights, PRECISION)
        if SCALED:
            weights *= latent_scale
        if SCALED and rows < 64:  # both products take them from registers, in which they lie in other ways
            again = latents + place[:, None] * value_dim + e[None, :]
            c = _narrow(tl.load(again, mask=c_in, other=0, eviction_policy="evict_first"), PRECISION)
        mixed = mixed * keep[:, None] + _dot(_narrow(weights, PRECISION), c, PRECISION)
        peak = higher
    return peak, total, mixed


@triton.jit
def attend_latent(
    out,
    q,
    q_rope,
    ropes,
    latents,
    rope_scales,
    latent_scales,
    positions,
    token_rows,
    tables,
    table_stride,
    tiles,
    tile_heads,
    heads,
    dim,
    value_dim,
    block_size,
    scale,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    AT_ONCE: tl.constexpr = 64,
):
    """out [T, heads, value_dim] = softmax(scale (q C^T + q_rope R^T)) C, as ops.LatentAttention.

    q [T, heads, value_dim], q_rope [T, heads, dim]; the cache is as in write_kv, with R as keys and C as
    values of one head, and has the step's tokens. A program has tile_heads heads of the tokens from tiles[i]
    to tiles[i + 1], all of one row of the step: BLOCK_M pairs at most, of which it computes AT_ONCE together.
    Grid (tiles, heads / tile_heads). Reads what its tokens see once for these; 4 * value_dim + 2 * dim
    operations a pair and position.
    """
    rows: tl.constexpr = AT_ONCE if AT_ONCE < BLOCK_M else BLOCK_M
    e, begin = tl.arange(0, RANK), tl.load(tiles + tl.program_id(0))
    last = tl.load(tiles + tl.program_id(0) + 1)
    table = tables + tl.load(token_rows + begin).to(tl.int64) * table_stride
    for part in range(BLOCK_M // rows):
        lane = part * rows + tl.arange(0, rows)
        token, head = begin + lane // tile_heads, tl.program_id(1) * tile_heads + lane % tile_heads
        inside = (token < last) & (head < heads)
        own = token.to(tl.int64) * heads + head
        queries = _queries(q, q_rope, own, inside, (dim, value_dim), PRECISION, ROPE, RANK)
        newest = tl.load(positions + token, mask=inside, other=-1)
        peak, total = tl.full((rows,), float("-inf"), tl.float32), tl.zeros((rows,), tl.float32)
        mixed = tl.zeros((rows, RANK), tl.float32)
        for segment in range(tl.max(newest, 0) // SEGMENT + 1):
            found = _segment(
                queries,
                segment,
                newest,
                (table, block_size),
                (ropes, latents, rope_scales, latent_scales),
                (dim, value_dim),
                scale,
                SCALED,
                PRECISION,
                ROPE,
                RANK,
            )
            peak, total, mixed = _merge(peak, total, mixed, found[0], found[1], found[2])
        mixed = tl.div_rn(mixed, tl.where(total == 0, 1.0, total)[:, None])
        at = out + own[:, None] * value_dim + e[None, :]
        tl.store(at, mixed, mask=inside[:, None] & (e < value_dim)[None, :])


@triton.jit
def attend_latent_segments(
    partial,
    stats,
    items,
    firsts,
    q,
    q_rope,
    ropes,
    latents,
    rope_scales,
    latent_scales,
    positions,
    token_rows,
    tables,
    table_stride,
    tokens,
    tile_heads,
    heads,
    dim,
    value_dim,
    block_size,
    scale,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Compute each listed segment: partial [items, heads, value_dim] and stats [items, heads, 2] float32.

    As `attend_segments`, with arguments as in `attend_latent`. Grid (any number, heads / tile_heads). Reads
    the segment's latents once for each tile of heads.
    """
    lane, e = tl.arange(0, BLOCK_M), tl.arange(0, RANK)
    head = tl.program_id(1) * tile_heads + lane
    inside = (lane < tile_heads) & (head < heads)
    for item in range(tl.program_id(0), tl.load(firsts + tokens), tl.num_programs(0)):
        token, segment = tl.load(items + 2 * item).to(tl.int64), tl.load(items + 2 * item + 1)
        queries = _queries(q, q_rope, token * heads + head, inside, (dim, value_dim), PRECISION, ROPE, RANK)
        peak, total, mixed = _segment(
            queries,
            segment,
            tl.load(positions + token) + tl.zeros((BLOCK_M,), tl.int32),
            (tables + tl.load(token_rows + token).to(tl.int64) * table_stride, block_size),
            (ropes, latents, rope_scales, latent_scales),
            (dim, value_dim),
            scale,
            SCALED,
            PRECISION,
            ROPE,
            RANK,
        )
        at = (item + tl.zeros_like(head).to(tl.int64)) * heads + head
        tl.store(stats + 2 * at, peak, mask=inside)
        tl.store(stats + 2 * at + 1, total, mask=inside)
        to = partial + at[:, None] * value_dim + e[None, :]
        tl.store(to, mixed, mask=inside[:, None] & (e < value_dim)[None, :])
