"""Log-probabilities of the chosen and of the most likely tokens, of raw logits (quire.sampling.logprobs)."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.sampling import _fault, _key, _kth_greatest, _survey, _weights


@triton.jit
def token_logprobs(logprobs, ranks, faults, log_sums, tokens, logits, rows, vocab, BLOCK: tl.constexpr):
    """logprobs[p] float32 and ranks[p] int32 = those of tokens[p] in row rows[p] of logits [L, vocab].

    faults[p] int32 is the fault of the row (of FAULTS) or 0. log_sums float64 [P, 2] = the greatest logit and
    the logarithm of the sum of weights, for top_logprobs. The sum is in float64 over lanes, then blocks in
    order: a function of the row. Grid (P,). Reads a row twice.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    best, _, invalid = _survey(logits, vocab, BLOCK)
    tl.store(faults + row, _fault(best, invalid, 0.0, 0))
    token = tl.load(tokens + row)
    own = tl.load(logits + token)
    total, before = tl.zeros((1,), tl.float64), 0 * vocab
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        weights = _weights(x, best, tl.full((1,), 1.0, tl.float64))
        total += tl.sum(tl.where(at < vocab, weights, 0.0), 0)
        before += tl.sum(((x > own) | ((x == own) & (at < token))).to(tl.int32), 0)
    log_sum = tl.max(tl.log(total), 0)
    tl.store(log_sums + 2 * row, best.to(tl.float64))
    tl.store(log_sums + 2 * row + 1, log_sum)
    tl.store(logprobs + row, (own.to(tl.float64) - best.to(tl.float64) - log_sum).to(tl.float32))
    tl.store(ranks + row, before + 1)


@triton.jit
def top_logprobs(
    logprobs,
    tokens,
    log_sums,
    logits,
    rows,
    kept,
    kept_ids,
    vocab,
    k,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """logprobs float32 and tokens int32 [P, MOST] = the first k <= MOST of the ranking of each row, in order.

    rows int32 [P] are those of logits [L, vocab]; log_sums are those of token_logprobs; kept float32 and
    kept_ids int32 [P, MOST] are scratch. Grid (P,). Reads a row five times; a token's rank among the k is
    counted, so nothing is sorted.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    kept, kept_ids = kept + row * MOST, kept_ids + row * MOST
    least, equal_left = _kth_greatest(logits, vocab, k, BLOCK)
    count, equal = 0 * vocab, 0 * vocab
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        key = _key(x)
        same = ((key == least) & (at < vocab)).to(tl.int32)
        chosen = (at < vocab) & ((key > least) | ((same > 0) & (equal + tl.cumsum(same, 0) <= equal_left)))
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kept + place, x, mask=chosen)
        tl.store(kept_ids + place, at, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
        equal += tl.sum(same, 0)
    tl.debug_barrier()  # other threads of the program read what was written
    entry = tl.arange(0, MOST)
    inside = entry < k
    x = tl.load(kept + entry, mask=inside, other=float("-inf"))
    ids = tl.load(kept_ids + entry, mask=inside, other=0)
    first = (x[None, :] > x[:, None]) | ((x[None, :] == x[:, None]) & (entry[None, :] < entry[:, None]))
    rank = tl.sum((first & inside[None, :]).to(tl.int32), 1)
    best, log_sum = tl.load(log_sums + 2 * row), tl.load(log_sums + 2 * row + 1)
    tl.store(logprobs + row * MOST + rank, (x.to(tl.float64) - best - log_sum).to(tl.float32), mask=inside)
    tl.store(tokens + row * MOST + rank, ids, mask=inside)
