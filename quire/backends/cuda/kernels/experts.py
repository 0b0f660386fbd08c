"""Mixture of experts around its products: routing, sorting of pairs (token, expert) by expert, the sum."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def route(
    picked,
    shares,
    scores,
    bias,
    factors,
    experts,
    chosen,
    scaling,
    floor,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """picked int32 and shares float32 [T, chosen] of scores [T, experts], best first, as experts.Routing.

    bias and factors float32 [experts]; scaling and floor are pointers to a float64. Experts are chosen by
    float32 ranks, ties to the lower number; affinities and shares are float64 until stored. EXPERTS is a
    power of two. Grid (T,); a token's sums are those of one program.
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
    left, total = inside, tl.zeros((1,), tl.float64)
    for _ in range(chosen):
        best = tl.max(tl.where(left, rank, float("-inf")), 0)
        expert = tl.min(tl.where(left & (rank == best), e, EXPERTS), 0)
        total += tl.sum(tl.where(e == expert, affinity, 0.0), 0)
        left = left & (e != expert)
    left = inside
    divisor = total + tl.load(floor) if NORMALIZED else tl.full((1,), 1.0, tl.float64)
    for i in range(chosen):
        best = tl.max(tl.where(left, rank, float("-inf")), 0)
        expert = tl.min(tl.where(left & (rank == best), e, EXPERTS), 0)
        share = tl.load(scaling) * (tl.sum(tl.where(e == expert, affinity, 0.0), 0) / divisor)
        if FACTORS:
            share *= tl.load(factors + expert).to(tl.float64)
        share = tl.where(invalid, float("nan"), tl.max(share, 0).to(tl.float32))
        tl.store(picked + token * chosen + i, expert)
        tl.store(shares + token * chosen + i, share)
        left = left & (e != expert)


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
def sum_experts(out, x, picked, shares, width, chosen, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of shares[t, i] * x[t, i] in order of expert number: x [T, chosen, width], out [T, width].

    Grid (T, width / BLOCK), CHOSEN a power of two. Each product and sum is rounded, as in the reference.
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
        total += tl.sum(tl.where(experts == last, share, 0.0), 0) * own
    tl.store(out + token * width + column, total, mask=inside)
