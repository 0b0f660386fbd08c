"""Log-probabilities of the chosen and of the most likely tokens, of raw logits (quire.sampling.logprobs).

Many programs look through the parts of a row, then one adds what they found.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.sampling import (
    _fault,
    _gather,
    _keep,
    _kth_greatest,
    _kth_greatest_top,
    _surveyed,
    _weights,
)


@triton.jit
def rank_logits(
    sums,
    before,
    tops,
    firsts,
    tokens,
    logits,
    rows,
    vocab,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums float64 and before int32 [P, parts] = of each BLOCK logits of row rows[p]: their weight, and how
    many are before tokens[p] in the ranking.

    tops and firsts [P, parts] are those of survey_logits. Grid (P, parts). Reads each row once.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _, _ = _surveyed(tops + row * parts, firsts + row * parts, parts, PARTS)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    token, at = tl.load(tokens + row), part * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(logits + token)
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
    weights = _weights(x, best, tl.full((1,), 1.0, tl.float64))
    tl.store(sums + row * parts + part, tl.sum(tl.where(at < vocab, weights, 0.0), 0))
    earlier = (at < vocab) & ((x > own) | ((x == own) & (at < token)))
    tl.store(before + row * parts + part, tl.sum(earlier.to(tl.int32), 0))


@triton.jit
def token_logprobs(
    logprobs,
    ranks,
    faults,
    log_sums,
    sums,
    before,
    tops,
    firsts,
    tokens,
    logits,
    rows,
    vocab,
    parts,
    PARTS: tl.constexpr,
):
    """logprobs[p] float32 and ranks[p] int32 = those of tokens[p] in row rows[p] of logits [L, vocab].

    faults[p] int32 is the fault of the row (of FAULTS) or 0. log_sums float64 [P, 2] = the greatest logit and
    the logarithm of the sum of weights, for top_logprobs. sums and before [P, parts] are those of
    rank_logits, tops and firsts those of survey_logits. Grid (P,). The sum is over the parts in float64: a
    function of the row.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    best, _, invalid = _surveyed(tops + row * parts, firsts + row * parts, parts, PARTS)
    tl.store(faults + row, _fault(best, invalid, 0.0, 0))
    total = tl.sum(tl.load(sums + row * parts + at, mask=at < parts, other=0.0), 0)
    rank = tl.sum(tl.load(before + row * parts + at, mask=at < parts, other=0), 0) + 1
    log_sum = tl.log(total)
    own = tl.load(logits + tl.load(rows + row).to(tl.int64) * vocab + tl.load(tokens + row))
    tl.store(log_sums + 2 * row, best.to(tl.float64))
    tl.store(log_sums + 2 * row + 1, log_sum)
    tl.store(logprobs + row, (own.to(tl.float64) - best.to(tl.float64) - log_sum).to(tl.float32))
    tl.store(ranks + row, rank)


@triton.jit
def top_logprobs(
    logprobs,
    tokens,
    log_sums,
    tops,
    logits,
    rows,
    kept,
    kept_ids,
    vocab,
    parts,
    k,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """logprobs float32 and tokens int32 [P, MOST] = the first k <= MOST of the ranking of each row, in order.

    rows int32 [P] are those of logits [L, vocab]; log_sums are those of token_logprobs, tops [P, parts] those
    of survey_logits; kept float32 and kept_ids int32 [P, vocab] are scratch. Grid (P,). Reads a row once, as
    the greatest logits of parts bound what is among the k; a token's rank among these is counted, so nothing
    is sorted.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    kept, kept_ids = kept + row * vocab, kept_ids + row * vocab
    least = _kth_greatest_top(tops + row * parts, parts, k, PARTS)
    count = _gather(kept, kept_ids, logits, vocab, least, BLOCK)
    least, equal_left = _kth_greatest(kept, count, k, BLOCK)
    best, log_sum = tl.load(log_sums + 2 * row), tl.load(log_sums + 2 * row + 1)
    one = tl.full((1,), 1.0, tl.float64)
    count, _total = _keep(kept, kept_ids, count, best, one, 0.0, 0.0, least, equal_left, BLOCK)
    entry = tl.arange(0, MOST)
    inside = entry < k
    x = tl.load(kept + entry, mask=inside, other=float("-inf"))
    ids = tl.load(kept_ids + entry, mask=inside, other=0)
    first = (x[None, :] > x[:, None]) | ((x[None, :] == x[:, None]) & (entry[None, :] < entry[:, None]))
    rank = tl.sum((first & inside[None, :]).to(tl.int32), 1)
    tl.store(logprobs + row * MOST + rank, (x.to(tl.float64) - best - log_sum).to(tl.float32), mask=inside)
    tl.store(tokens + row * MOST + rank, ids, mask=inside)
