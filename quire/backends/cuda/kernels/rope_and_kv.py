"""Rotation by position, and the write of keys and values to the paged cache: apart, or in one launch."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.rounding import all_finite, to_nearest


@triton.jit
def _normed_head(x, weight, inside, lane, dim, eps, offset):
    """Return lanes `lane` of a head at x, normed over its dim numbers: each program norms one head alone."""
    own = tl.load(x + tl.arange(0, inside.shape[0]), mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt_rn(tl.div_rn(tl.sum(own * own, 0), dim.to(tl.float32)) + eps)
    at = tl.load(x + lane, mask=inside, other=0.0).to(tl.float32)
    return tl.div_rn(at, root) * (tl.load(weight + lane, mask=inside, other=0.0) + offset)


@triton.jit
def _rotated_head(
    x, weight, cos, sin, dim, rotated, eps, offset, NORM: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr
):
    """Return a head [DIM] after its norm (NORM) and rotation: ROPE "none", "halves" or "interleaved".

    A pair (a, b) becomes (a cos - b sin, b cos + a sin), each product and sum rounded, as in the reference.
    """
    lane = tl.arange(0, DIM)
    inside = lane < dim
    if NORM:
        own = _normed_head(x, weight, inside, lane, dim, eps, offset)
    else:
        own = tl.load(x + lane, mask=inside, other=0.0).to(tl.float32)
    if ROPE != "none":
        own = _turned(x, own, weight, cos, sin, dim, rotated, eps, offset, NORM, ROPE, DIM)
    return own


@triton.jit
def _turned(
    x,
    own,
    weight,
    cos,
    sin,
    dim,
    rotated,
    eps,
    offset,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return `own`, the head at x after its norm, rotated."""
    lane = tl.arange(0, DIM)
    inside = lane < dim
    half = rotated // 2
    if ROPE == "interleaved":
        pair, is_first = lane // 2, lane % 2 == 0
        other_lane = tl.where(is_first, lane + 1, lane - 1)
    else:
        is_first = lane < half
        pair = tl.where(is_first, lane, lane - half)
        other_lane = tl.where(is_first, lane + half, lane - half)
    turned = lane < rotated
    other_lane = tl.where(turned, other_lane, 0)
    if NORM:
        other = _normed_head(x, weight, inside, other_lane, dim, eps, offset)
    else:
        other = tl.load(x + other_lane, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    apart = other * s
    return tl.where(turned, own * c + tl.where(is_first, -apart, apart), own)


@triton.jit
def _place(tables, table_stride, token_rows, positions, token, block_size):
    """Return the place of a token in a cache: block id * block_size + offset."""
    position = tl.load(positions + token)
    table = tables + tl.load(token_rows + token).to(tl.int64) * table_stride
    return tl.load(table + position // block_size).to(tl.int64) * block_size + position % block_size


@triton.jit
def _store_int8(to, scales, place, x, finite, inside):
    """Store a vector as int8 and its scale, max |x| / 127; the scale NaN if not `finite`."""
    largest = tl.max(tl.where(inside, tl.abs(x), 0.0), 0)
    usable = finite & (largest > 0)
    inverse = tl.where(usable, tl.div_rn(127.0, tl.where(usable, largest, 1.0)), 0.0)
    q = tl.where(usable, to_nearest(tl.minimum(tl.maximum(x * inverse, -127.0), 127.0)), 0.0)
    tl.store(to + tl.arange(0, x.shape[0]), q.to(tl.int8), mask=inside)
    tl.store(scales + place, tl.where(finite, tl.div_rn(largest, 127.0), float("nan")))


@triton.jit
def _store_kv(
    keys,
    values,
    key_scales,
    value_scales,
    place,
    k,
    v,
    dim,
    value_dim,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Store the key k [DIM] and the value v [VALUE_DIM] of a head at `place`.

    A value that is not finite as stored becomes zeros, and its key NaN (see ops.Attention).
    """
    lane, value_lane = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    inside, value_inside = lane < dim, value_lane < value_dim
    key_to, value_to = keys + place * dim, values + place * value_dim
    if SCALED:
        kept = all_finite(v)
        _store_int8(key_to, key_scales, place, tl.where(kept, k, 0.0), kept & all_finite(k), inside)
        _store_int8(value_to, value_scales, place, tl.where(kept, v, 0.0), True, value_inside)
    else:
        kept = all_finite(v.to(values.dtype.element_ty).to(tl.float32))
        tl.store(key_to + lane, tl.where(kept, k, float("nan")), mask=inside)
        tl.store(value_to + value_lane, tl.where(kept, v, 0.0), mask=value_inside)


@triton.jit
def rotary(out, x, cos, sin, heads, dim, rotated, ROPE: tl.constexpr, DIM: tl.constexpr):
    """out = x [T, heads, dim] with the first `rotated` numbers of each head rotated, as ops.Rotary.

    cos and sin [T, rotated / 2] float32. Grid (T, heads). Reads x twice, once from the cache; no sums.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = (token * heads + head) * dim
    half = rotated // 2
    turned = _rotated_head(
        x + at, x, cos + token * half, sin + token * half, dim, rotated, 0.0, 0.0, False, ROPE, DIM
    )
    tl.store(out + at + tl.arange(0, DIM), turned, mask=tl.arange(0, DIM) < dim)


@triton.jit
def write_kv(
    keys,
    values,
    key_scales,
    value_scales,
    k,
    v,
    positions,
    token_rows,
    tables,
    table_stride,
    groups,
    dim,
    value_dim,
    block_size,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write k [T, groups, dim] and v [T, groups, value_dim] to the cache of a layer.

    keys [blocks, block_size, groups, dim] and values in the format of the cache; if SCALED that is int8, and
    key_scales and value_scales [blocks, block_size, groups] float32. tables int32 [rows, table_stride]. Grid
    (T, groups). Reads and writes each number once.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = _place(tables, table_stride, token_rows, positions, token, block_size) * groups + group
    lane, value_lane = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    own = token * groups + group
    key = tl.load(k + own * dim + lane, mask=lane < dim, other=0.0).to(tl.float32)
    value = tl.load(v + own * value_dim + value_lane, mask=value_lane < value_dim, other=0.0).to(tl.float32)
    _store_kv(
        keys, values, key_scales, value_scales, place, key, value, dim, value_dim, DIM, VALUE_DIM, SCALED
    )


@triton.jit
def rope_and_kv(
    q_out,
    keys,
    values,
    key_scales,
    value_scales,
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    token_rows,
    tables,
    table_stride,
    heads,
    groups,
    dim,
    value_dim,
    rotated,
    block_size,
    eps,
    offset,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Norm and rotate queries and keys and write the cache: q_out, and keys and values as write_kv.

    q, q_out [T, heads, dim]; k, v, the cache and the tables as in write_kv; weights [dim] of norms of heads
    if NORM; cos and sin as in rotary. Grid (T, heads + groups), one warp a program: replaces six launches
    whose time is mostly that of launching. A norm sums a head within its program, in one order.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turn = token * (rotated // 2)
    lane, value_lane = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    if head < heads:
        at = (token * heads + head) * dim
        turned = _rotated_head(
            q + at, q_weight, cos + turn, sin + turn, dim, rotated, eps, offset, NORM, ROPE, DIM
        )
        tl.store(q_out + at + lane, turned, mask=lane < dim)
    else:
        group = head - heads
        own = token * groups + group
        key = _rotated_head(
            k + own * dim, k_weight, cos + turn, sin + turn, dim, rotated, eps, offset, NORM, ROPE, DIM
        )
        value_at = v + own * value_dim + value_lane
        value = tl.load(value_at, mask=value_lane < value_dim, other=0.0).to(tl.float32)
        place = _place(tables, table_stride, token_rows, positions, token, block_size) * groups + group
        _store_kv(
            keys, values, key_scales, value_scales, place, key, value, dim, value_dim, DIM, VALUE_DIM, SCALED
        )
