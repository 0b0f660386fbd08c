"""Paged attention in fixed partitions: 64 positions, and segments of 512, counted from position 0.

A segment is a running softmax over its partitions in order, and segments are merged in order. So the sums of
a token depend on its position alone, whether one program computes all segments (`attend`: prompts and
mixed steps) or one each (`attend_segments`, then `merge_segments`: few tokens with long contexts).
Each partition is two matrix products of fixed size along what is summed, dim and 64. The sum of the weights
is a third, with ones: a sum over lanes would have another order for another tile. Maxima have no order.
Positions that a token does not see add 0 and multiply by 1.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

PARTITION = tl.constexpr(64)
SEGMENT = tl.constexpr(512)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _narrow(x, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(a, b)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _finite(peak):
    """Return peaks, 0 for those of nothing seen."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _merge(peak, total, mixed, own_peak, own_total, own_mixed):
    """Add a segment, or a partition, to what was summed before."""
    higher = tl.maximum(peak, own_peak)
    before, now = tl.exp2(peak - _finite(higher)), tl.exp2(own_peak - _finite(higher))
    total = total * before + own_total * now
    return higher, total, mixed * before[:, None] + own_mixed * now[:, None]


@triton.jit
def _capped(scores, softcap):
    """Return softcap * tanh(scores / softcap)."""
    x = tl.div_rn(scores, softcap)
    small = tl.exp(-2.0 * tl.abs(x))
    magnitude = softcap * tl.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def _sums(weights, PRECISION: tl.constexpr):
    """Return the sum of each row."""
    ones = _narrow(tl.full((PARTITION, 16), 1.0, tl.float32), PRECISION)
    return tl.max(_dot(_narrow(weights, PRECISION), ones, PRECISION), 1)  # of sixteen equal numbers


@triton.jit
def _partition(
    state,
    q,
    start,
    oldest,
    newest,
    places,
    cache,
    sizes,
    scale,
    softcap,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Return the running softmax (peak, total, mixed) after the partition at `start`.

    oldest and newest [BLOCK_M] are the positions that each row sees; places = (table of the row, block size).
    """
    peak, total, mixed = state
    keys, values, key_scales, value_scales = cache
    table, block_size = places
    groups, group, dim, value_dim = sizes
    at = start + tl.arange(0, PARTITION)
    held = (at >= tl.min(oldest, 0)) & (at <= tl.max(newest, 0))
    block = tl.load(table + at // block_size, mask=held, other=0).to(tl.int64)
    place = (block * block_size + at % block_size) * groups + group
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    k = tl.load(keys + place[:, None] * dim + d[None, :], mask=held[:, None] & (d < dim)[None, :], other=0)
    scores = _dot(q, tl.trans(_narrow(k, PRECISION)), PRECISION)
    if SCALED:
        scores *= tl.load(key_scales + place, mask=held, other=0.0)[None, :]
    scores *= scale
    if CAP:
        scores = _capped(scores, softcap)
    scores *= _LOG2_E
    seen = (at[None, :] >= oldest[:, None]) & (at[None, :] <= newest[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - _finite(higher)[:, None])
    keep = tl.exp2(peak - _finite(higher))
    # Where warps have no instructions in groups, the compiler divides all products among them as the last
    # one: by rows if that has few columns. By columns, each warp would hold the queries of all rows.
    rows: tl.constexpr = q.shape[0]
    SUMS_LAST: tl.constexpr = not SCALED and 2 * rows >= VALUE_DIM
    if not SUMS_LAST:
        sums = _sums(weights, PRECISION)
    v_in = held[:, None] & (e < value_dim)[None, :]
    v = tl.load(values + place[:, None] * value_dim + e[None, :], mask=v_in, other=0)
    if SCALED:
        weights *= tl.load(value_scales + place, mask=held, other=0.0)[None, :]
    own = _dot(_narrow(weights, PRECISION), _narrow(v, PRECISION), PRECISION)
    if SUMS_LAST:
        mixed = mixed * keep[:, None] + own
        return higher, total * keep + _sums(weights, PRECISION), mixed
    else:
        return higher, total * keep + sums, mixed * keep[:, None] + own


@triton.jit
def _segment(
    q,
    segment,
    oldest,
    newest,
    places,
    cache,
    sizes,
    scale,
    softcap,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Return peak, total and mixed of a segment: of those of its partitions that hold what a row sees."""
    rows: tl.constexpr = q.shape[0]
    first, last = tl.min(oldest, 0), tl.max(newest, 0)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, VALUE_DIM), tl.float32)
    begin = tl.maximum(segment * SEGMENT, first // PARTITION * PARTITION)
    for start in range(begin, tl.minimum(segment * SEGMENT + SEGMENT, last + 1), PARTITION):
        peak, total, mixed = _partition(
            (peak, total, mixed),
            q,
            start,
            oldest,
            newest,
            places,
            cache,
            sizes,
            scale,
            softcap,
            CAP,
            SCALED,
            PRECISION,
            DIM,
            VALUE_DIM,
        )
    return peak, total, mixed


@triton.jit
def _seen_range(position, window, chunked):
    """Return the first and last positions that tokens see: a window of 0 is none."""
    sliding = tl.maximum(0, position + 1 - window)
    period = tl.maximum(window, 1)
    oldest = tl.where(chunked > 0, position // period * period, sliding)
    return tl.where(window > 0, oldest, 0), position


@triton.jit
def _sinks(sinks, head, inside, has_sinks):
    """Return peak and total before the first segment."""
    sunk = inside & (has_sinks > 0)
    peak = tl.load(sinks + head, mask=sunk, other=float("-inf")) * _LOG2_E
    return peak, tl.where(sunk, 1.0, 0.0)


@triton.jit
def attend(
    out,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    positions,
    token_rows,
    ends,
    context_lens,
    tables,
    table_stride,
    tiles,
    heads,
    groups,
    dim,
    value_dim,
    block_size,
    window,
    chunked,
    has_ends,
    has_sinks,
    scale,
    softcap,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """out [T, heads, value_dim] = ops.Attention of q [T, heads, dim] over a cache that has the step's tokens.

    The cache is as in write_kv; ends [T] are the ends of what tokens see if has_ends; window 0 is none. A
    program computes the tokens from tiles[i] to tiles[i + 1], all of one row, of the heads that share a
    group, at most BLOCK_M (16 or more) in all. Grid (tiles, groups). Reads the keys and values that its
    tokens see once; 4 * dim operations a pair of token and position. PRECISION is that of products: "bf16"
    for caches in bfloat16 and int8, "tf32" for float16, "ieee" for float32.
    """
    group, lane = tl.program_id(1), tl.arange(0, BLOCK_M)
    shared, begin = heads // groups, tl.load(tiles + tl.program_id(0))
    token, head = begin + lane // shared, group * shared + lane % shared
    inside = token < tl.load(tiles + tl.program_id(0) + 1)
    position = tl.load(positions + token, mask=inside, other=0)
    row = tl.load(token_rows + begin)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    q_at = q + (token[:, None].to(tl.int64) * heads + head[:, None]) * dim + d[None, :]
    own_q = tl.load(q_at, mask=inside[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
    own_q = _narrow(own_q, PRECISION)
    oldest, newest = _seen_range(position, window, chunked)
    ended = inside & (has_ends > 0)
    end = tl.minimum(tl.load(ends + token, mask=ended, other=0), tl.load(context_lens + row))
    newest = tl.where(ended, end - 1, newest)
    peak, total = _sinks(sinks, head, inside, has_sinks)
    mixed = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    low, high = tl.where(inside, oldest, 2147483647), tl.where(inside, newest, -1)
    for segment in range(tl.min(low, 0) // SEGMENT, tl.max(high, 0) // SEGMENT + 1):
        own = _segment(
            own_q,
            segment,
            low,
            high,
            (tables + row.to(tl.int64) * table_stride, block_size),
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
        peak, total, mixed = _merge(peak, total, mixed, own[0], own[1], own[2])
    mixed = tl.div_rn(mixed, tl.where(total == 0, 1.0, total)[:, None])
    out_at = out + (token[:, None].to(tl.int64) * heads + head[:, None]) * value_dim + e[None, :]
    tl.store(out_at, mixed, mask=inside[:, None] & (e < value_dim)[None, :])
