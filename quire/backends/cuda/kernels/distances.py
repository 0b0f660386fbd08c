"""Attention within the texts of a step whose scores have biases of distances (ops.RowAttention).

Partitions are those of attention.py, each a step of a running softmax. A program has sixteen tokens of one
head, so a token's sums depend on its own text alone.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.attention import _dot, _finite

PARTITION = tl.constexpr(64)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _partition(
    state, q, start, seen, places, biases, rows, scale, DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Return the running softmax (peak, total, mixed) of tokens after the partition at `start`.

    seen = (oldest, newest) of each token; places = (keys, values) of the text's first token in this head;
    rows = (the numbers from one key to the next, the same of values, those of a head of each); biases = (the
    table's column of this head, where each token's bucket of position 0 is, the numbers of a table's row).
    """
    peak, total, mixed = state
    (oldest, newest), (keys, values), (table, bucket_of_first, heads) = seen, places, biases
    key_row, value_row, dim, value_dim = rows
    at = start + tl.arange(0, PARTITION)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    held, place = at <= tl.max(newest, 0), at.to(tl.int64)
    k = tl.load(
        keys + place[:, None] * key_row + d[None, :], mask=held[:, None] & (d < dim)[None, :], other=0
    )
    v_in = held[:, None] & (e < value_dim)[None, :]
    v = tl.load(values + place[:, None] * value_row + e[None, :], mask=v_in, other=0)
    sees = (at[None, :] >= oldest[:, None]) & (at[None, :] <= newest[:, None])
    bucket = tl.load(bucket_of_first[:, None] + at[None, :], mask=sees, other=0)
    bias = tl.load(table + bucket * heads, mask=sees, other=0).to(tl.float32)
    scores = _dot(q, tl.trans(k), "ieee") * scale + bias
    scores = tl.where(sees, scores * _LOG2_E, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights, keep = tl.exp2(scores - _finite(higher)[:, None]), tl.exp2(peak - _finite(higher))
    return higher, total * keep + tl.sum(weights, 1), mixed * keep[:, None] + _dot(weights, v, "ieee")


@triton.jit
def attend_with_distances(
    out,
    q,
    keys,
    values,
    table,
    buckets,
    positions,
    token_rows,
    row_offsets,
    tokens,
    heads,
    groups,
    dim,
    value_dim,
    longest,
    reach,
    scale,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """out [T, heads, value_dim] = RowAttention of q [T, heads, dim] over keys [T, groups, dim] and values
    [T, groups, value_dim].

    buckets int32 has at d + longest - 1 the row of table [buckets, heads] with the bias of a position d after
    the token's own. A token sees `reach` positions on either side, or all if it is 0. Grid (T / BLOCK_M,
    heads). Tokens of several texts are computed one text after the other. 2 * (dim + value_dim) operations a
    pair of tokens.
    """
    token, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    group, inside = head // (heads // groups), token < tokens
    position = tl.load(positions + token, mask=inside, other=0)
    row = tl.load(token_rows + token, mask=inside, other=-1)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    own = token[:, None].to(tl.int64) * heads + head
    own_q = tl.load(q + own * dim + d[None, :], mask=inside[:, None] & (d < dim)[None, :], other=0.0)
    peak, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    first_row = tl.min(tl.where(inside, row, 2147483647), 0)
    for this in range(first_row, tl.max(row, 0) + 1):
        begin, mine = tl.load(row_offsets + this), inside & (row == this)
        last = tl.load(row_offsets + this + 1) - begin - 1
        oldest = tl.where(reach == 0, 0, tl.maximum(position - reach, 0))
        newest = tl.where(reach == 0, last, tl.minimum(position + reach, last))
        oldest, newest = tl.where(mine, oldest, 2147483647), tl.where(mine, newest, -1)
        first = begin.to(tl.int64) * groups + group
        state = (peak, total, mixed)
        for start in range(tl.min(oldest, 0) // PARTITION * PARTITION, tl.max(newest, 0) + 1, PARTITION):
            state = _partition(
                state,
                own_q,
                start,
                (oldest, newest),
                (keys + first * dim, values + first * value_dim),
                (table + head, buckets + longest - 1 - position, heads),
                (groups * dim, groups * value_dim, dim, value_dim),
                scale,
                DIM,
                VALUE_DIM,
            )
        peak, total = tl.where(mine, state[0], peak), tl.where(mine, state[1], total)
        mixed = tl.where(mine[:, None], state[2], mixed)
    mixed = tl.div_rn(mixed, tl.where(total == 0, 1.0, total)[:, None])
    tl.store(out + own * value_dim + e[None, :], mixed, mask=inside[:, None] & (e < value_dim)[None, :])
