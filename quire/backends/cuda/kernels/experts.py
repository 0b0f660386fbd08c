"""Mixture of experts around its products: routing, sorting of pairs (token, expert) by expert, the sum."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _best(rank, e, left, EXPERTS: tl.constexpr):
    """Return the expert that has the largest rank among those left, the lower one of two."""
    best = tl.max(tl.where(left, rank, float("-inf")), 0)
    return tl.min(tl.where(left & (rank == best), e, EXPERTS), 0)


@triton.jit
def _in_kept_groups(rank, e, inside, size, groups, kept_groups, RANK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return which experts are in the best groups of `size` adjacent ones, ranked by "max" or "top2"."""
    of_group = tl.full((EXPERTS,), float("-inf"), tl.float32)
    for group in range(groups):
        mine = inside & (e // size == group)
        best = tl.max(tl.where(mine, rank, float("-inf")), 0)
        if RANK == "top2":
            others = mine & (e != _best(rank, e, mine, EXPERTS))
            best += tl.max(tl.where(others, rank, float("-inf")), 0)
        of_group = tl.where(mine, best, of_group)
    left, kept = inside, inside & (e < 0)
    for _ in range(kept_groups):
        mine = inside & (e // size == _best(of_group, e, left, EXPERTS) // size)
        kept, left = kept | mine, left & (mine == 0)
    return kept


@triton.jit
def _store_shares(
    picked,
    shares,
    expert,
    share,
    factors,
    chosen,
    scaling,
    invalid,
    FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Store the experts of a token and their shares, in lanes [EXPERTS] of which `chosen` are used."""
    lane = tl.arange(0, EXPERTS)
    used, at = lane < chosen, tl.program_id(0).to(tl.int64) * chosen + lane
    share = tl.load(scaling) * share
    if FACTORS:
        share *= tl.load(factors + expert, mask=used, other=0.0).to(tl.float64)
    tl.store(picked + at, expert, mask=used)
    tl.store(shares + at, tl.where(invalid, float("nan"), share.to(tl.float32)), mask=used)


@triton.jit
def route(
    picked,
    shares,
    scores,
    bias,
    factors,
    experts,
    chosen,
    groups,
    kept_groups,
    scaling,
    floor,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """picked int32 and shares float32 [T, chosen] of scores [T, experts], best first, as experts.Routing.

    bias and factors float32 [experts]; scaling and floor are pointers to a float64. GROUPS is "" or the rank
    of groups. Experts are chosen by float32 ranks, ties to the lower number; affinities and shares are
    float64 until stored. EXPERTS is a power of two. Grid (T,); a token's sums are those of one program.
    """
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    inside = e < experts
    score = tl.load(scores + token * experts + e, mask=inside, other=float("-inf")).to(tl.float64)
    invalid = tl.sum((score != score).to(tl.int32), 0) > 0
    if SIGMOID:
        affinity = 1.0 / (1.0 + tl.exp(-score))
    else:
        raised = tl.exp(score - tl.max(score, 0))
        affinity = raised / tl.sum(raised, 0)
    affinity = tl.where(inside, affinity, 0.0)
    rank = affinity.to(tl.float32)
    if BIAS:
        rank += tl.load(bias + e, mask=inside, other=0.0)
    invalid = invalid | (tl.sum(((rank != rank) & inside).to(tl.int32), 0) > 0)
    rank = tl.where(inside & (rank == rank), rank, float("-inf"))
    if GROUPS != "":
        kept = _in_kept_groups(rank, e, inside, experts // groups, groups, kept_groups, GROUPS, EXPERTS)
        rank = tl.where(kept, rank, float("-inf"))
    left, own, share = inside, tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.float64)
    for i in range(chosen):
        expert = _best(rank, e, left, EXPERTS)
        own = tl.where(e == i, expert, own)
        share = tl.where(e == i, tl.sum(tl.where(e == expert, affinity, 0.0), 0), share)
        left = left & (e != expert)
    if NORMALIZED:
        share = share / (tl.sum(share, 0) + tl.load(floor))
    _store_shares(picked, shares, own, share, factors, chosen, scaling, invalid, FACTORS, EXPERTS)


@triton.jit
def route_apart(
    picked,
    shares,
    scores,
    factors,
    experts,
    chosen,
    scaling,
    margin,
    FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The same by Routing.margin: each expert has its softmax among those left whose scores are near it.

    scaling and margin are pointers to a float64.
    """
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    inside = e < experts
    score = tl.load(scores + token * experts + e, mask=inside, other=float("-inf")).to(tl.float64)
    invalid = tl.sum((score != score).to(tl.int32), 0) > 0
    rank = tl.where(score == score, score, float("-inf"))
    left, own, share = inside, tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.float64)
    for i in range(chosen):
        expert = _best(rank, e, left, EXPERTS)
        top = tl.sum(tl.where(e == expert, rank, 0.0), 0)
        far = (top - score) / tl.maximum(tl.abs(score), top) > tl.load(margin)
        raised = tl.where(left & (far == 0), tl.exp(score - top), 0.0)
        own = tl.where(e == i, expert, own)
        share = tl.where(e == i, 1.0 / tl.sum(raised, 0), share)
        left = left & (e != expert)
    invalid = invalid | (tl.sum((share != share).to(tl.int32), 0) > 0)
    _store_shares(picked, shares, own, share, factors, chosen, scaling, invalid, FACTORS, EXPERTS)


@triton.jit
def sort_by_expert(order, offsets, picked, pairs, BLOCK: tl.constexpr):
    """order int32 [pairs] = the pairs by expert, those of one in order; offsets int32 [experts + 1] their
    starts.

    picked int32 [pairs]. Grid (experts,): a program counts the pairs of experts before its own and then
    places its own, without atomics, so the order is that of the pairs.
    """
    expert = tl.program_id(0)
    before, own = 0 * pairs, 0 * pairs
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        chosen = tl.load(picked + at, mask=at < pairs, other=2147483647)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(offsets + expert, before)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets + expert + 1, pairs)
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = tl.load(picked + at, mask=at < pairs, other=2147483647) == expert
        place = before + own + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, at, mask=mine)
        own += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def scale_pairs(out, x, shares, width, chosen, BLOCK: tl.constexpr):
    """out [pairs, width] = shares[pair] * x[pair // chosen], the inputs of experts.

    Grid (pairs, width / BLOCK).
    """
    pair, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + pair // chosen * width + column, mask=column < width, other=0.0)
    tl.store(out + pair * width + column, tl.load(shares + pair) * own, mask=column < width)


@triton.jit
def sum_experts(
    out, x, picked, shares, width, chosen, WEIGHTED: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = sum of shares[t, i] * x[t, i] in order of expert number: x [T, chosen, width], out [T, width].

    Without WEIGHTED, of x[t, i] alone. Grid (T, width / BLOCK), CHOSEN a power of two. Each product and sum
    is rounded, as in the reference.
    """
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, CHOSEN)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    experts = tl.load(picked + token * chosen + i, mask=i < chosen, other=2147483647)
    share = tl.load(shares + token * chosen + i, mask=i < chosen, other=0.0)
    total, last = tl.zeros((BLOCK,), tl.float32), 0 * chosen - 1
    for _ in range(chosen):
        last = tl.min(tl.where(experts > last, experts, 2147483647), 0)
        which = tl.sum(tl.where(experts == last, i, 0), 0)
        own = tl.load(x + (token * chosen + which) * width + column, mask=inside, other=0.0)
        if WEIGHTED:
            own = tl.sum(tl.where(experts == last, share, 0.0), 0) * own
        total += own
    tl.store(out + token * width + column, total, mask=inside)


@triton.jit
def order_inputs(
    out, x, order, picked, width, pairs_of_row, matrices, PICKED: tl.constexpr, BLOCK: tl.constexpr
):
    """out [pairs, width] = x [pairs / pairs_of_row, width] in the order of each pair's matrix.

    Column j is input order[matrix, j], order int32 [matrices, width]. The matrix of a pair is
    picked[pair] if PICKED, else its number modulo `matrices`. Grid (pairs, width / BLOCK).
    """
    pair, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    matrix = tl.load(picked + pair) if PICKED else pair % matrices
    source = tl.load(order + matrix.to(tl.int64) * width + column, mask=inside, other=0)
    row = (pair // pairs_of_row).to(tl.int64)
    own = tl.load(x + row * width + source, mask=inside, other=0.0)
    tl.store(out + pair.to(tl.int64) * width + column, own, mask=inside)
