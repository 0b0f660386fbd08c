"""Attention over cached latents, which all heads share (ops.LatentAttention), and lists of pairs by head.

Partitions are those of attention.py: 64 positions from position 0 on, each a step of a running softmax. A
program has one token and sixteen of its heads, so its sums depend on the token's position alone.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

PARTITION = tl.constexpr(64)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _multiply(a, b, PRECISION: tl.constexpr):
    """Return a b, in bfloat16 or in float32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


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
    heads,
    dim,
    value_dim,
    block_size,
    scale,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
):
    """out [T, heads, value_dim] = softmax(scale (q C^T + q_rope R^T)) C, as ops.LatentAttention.

    q [T, heads, value_dim], q_rope [T, heads, dim]; the cache is as in write_kv, with R as keys and C as
    values of one head, and has the step's tokens. Grid (T, heads / 16). Reads what a token sees once for each
    sixteen heads; 4 * value_dim + 2 * dim operations a head and position.
    """
    token = tl.program_id(0).to(tl.int64)
    head, s = tl.program_id(1) * 16 + tl.arange(0, 16), tl.arange(0, PARTITION)
    d, e = tl.arange(0, ROPE), tl.arange(0, RANK)
    d_in, e_in, inside = d < dim, e < value_dim, head < heads
    own = token * heads + head
    value_at = own[:, None] * value_dim + e[None, :]
    of_c = tl.load(q + value_at, mask=inside[:, None] & e_in[None, :], other=0.0)
    rope_at = own[:, None] * dim + d[None, :]
    of_r = tl.load(q_rope + rope_at, mask=inside[:, None] & d_in[None, :], other=0.0)
    position = tl.load(positions + token)
    table = tables + tl.load(token_rows + token).to(tl.int64) * table_stride
    peak, total = tl.full((16,), float("-inf"), tl.float32), tl.zeros((16,), tl.float32)
    mixed = tl.zeros((16, RANK), tl.float32)
    for start in range(0, position + 1, PARTITION):
        at = start + s
        held = at <= position
        block = tl.load(table + at // block_size, mask=held, other=0).to(tl.int64)
        place = block * block_size + at % block_size
        c = tl.load(
            latents + place[:, None] * value_dim + e[None, :], mask=held[:, None] & e_in[None, :], other=0
        )
        r = tl.load(ropes + place[:, None] * dim + d[None, :], mask=held[:, None] & d_in[None, :], other=0)
        scores, turned = _multiply(of_c, tl.trans(c), PRECISION), _multiply(of_r, tl.trans(r), PRECISION)
        if SCALED:
            latent_scale = tl.load(latent_scales + place, mask=held, other=0.0)[None, :]
            scores *= latent_scale
            turned *= tl.load(rope_scales + place, mask=held, other=0.0)[None, :]
        scores = tl.where(held[None, :], (scores + turned) * scale * _LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights, keep = tl.exp2(scores - finite[:, None]), tl.exp2(peak - finite)
        total = total * keep + tl.sum(weights, 1)
        if SCALED:
            weights *= latent_scale
        mixed = mixed * keep[:, None] + _multiply(weights, c, PRECISION)
        peak = higher
    tl.store(out + value_at, tl.div_rn(mixed, total[:, None]), mask=inside[:, None] & e_in[None, :])
