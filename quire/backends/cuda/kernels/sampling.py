"""From a row of logits to a token, as docs/sampling.md defines it, without a sort of the vocabulary.

One program computes a row, so nothing depends on other rows. Weights and their sums are float64: a sum is
over the lanes of a block, then over the blocks of the row in order. Counts are integers, thresholds are found
in the bits of the logits. So the token is a function of the row and its parameters alone; it is that of the
definition unless `u` or `top_p` is within about 1e-14 of a boundary between two tokens.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

ONLY_MINUS_INF, NAN, INFINITE, EXCLUDED, TOO_LARGE = (tl.constexpr(i) for i in range(1, 6))  # of FAULTS
_BINS = tl.constexpr(256)


@triton.jit
def _key(logits):
    """Return uint32 keys in the order of logits; 0 and -0 are equal."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 2147483647) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _survey(logits, vocab, BLOCK: tl.constexpr):
    """Return the greatest logit, the first token that has it, and the number of NaN."""
    best, token, invalid = float("-inf") + tl.zeros((1,), tl.float32), 0 * vocab, 0 * vocab
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        invalid += tl.sum((x != x).to(tl.int32), 0)
        x = tl.where(x != x, float("-inf"), x)
        own = tl.max(x, 0)
        first = tl.min(tl.where(x == own, at, 2147483647), 0)
        token = tl.where(own > tl.max(best, 0), first, token)
        best = tl.maximum(best, own)
    return tl.max(best, 0), token, invalid


@triton.jit
def _weights(x, best, temperature):
    """Return exp((x - best) / temperature) in float64."""
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) / temperature)


@triton.jit
def _kth_greatest(logits, vocab, k, BLOCK: tl.constexpr):
    """Return the key of the k-th logit of the ranking, and how many with that key are among the first k.

    A radix selection, 8 bits at a time: counts in 256 bins of the keys that begin with what was found.
    """
    prefix, left = tl.zeros((1,), tl.uint32), k + tl.zeros((1,), tl.int32)
    bins = tl.arange(0, _BINS)
    for byte in tl.static_range(4):
        shift = tl.full((1,), 24 - 8 * byte, tl.uint32)
        counts = tl.zeros((_BINS,), tl.int32)
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            key = _key(tl.load(logits + at, mask=at < vocab, other=float("-inf")))
            among = at < vocab
            if byte > 0:
                among = among & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), _BINS, mask=among)
        from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # in this bin and greater ones
        found = tl.max(tl.where(from_here >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins > found, counts, 0), 0)
        prefix = prefix | (found.to(tl.uint32) << shift)
    return tl.max(prefix, 0), tl.max(left, 0)


@triton.jit
def _keep(
    kept,
    kept_ids,
    logits,
    vocab,
    best,
    temperature,
    min_p,
    lightest,
    key_least,
    equal_left,
    BLOCK: tl.constexpr,
):
    """Write the candidates in order of id; return their number, and the weight of those that min-p keeps.

    Candidates have a key above key_least, or are among the first equal_left that have it, and a weight of at
    least min_p and `lightest`.
    """
    count, equal = 0 * vocab, 0 * vocab
    total = tl.zeros((1,), tl.float64)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        key = _key(x)
        same = ((key == key_least) & (at < vocab)).to(tl.int32)
        number = equal + tl.cumsum(same, 0)
        ranked = (at < vocab) & ((key > key_least) | ((same > 0) & (number <= equal_left)))
        weights = _weights(x, best, temperature)
        ranked = ranked & (weights >= min_p)
        total += tl.sum(tl.where(ranked, weights, 0.0), 0)
        chosen = ranked & (weights >= lightest)
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kept + place, x, mask=chosen)
        tl.store(kept_ids + place, at, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
        equal += tl.sum(same, 0)
    tl.debug_barrier()  # other threads of the program read what was written
    return count, tl.max(total, 0)


@triton.jit
def _weight_above(kept, count, best, temperature, key_least, BLOCK: tl.constexpr):
    """Return the weight of the candidates with at least this key."""
    total = tl.zeros((1,), tl.float64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(kept + at, mask=at < count, other=float("-inf"))
        inside = (at < count) & (_key(x) >= key_least)
        total += tl.sum(tl.where(inside, _weights(x, best, temperature), 0.0), 0)
    return tl.max(total, 0)


@triton.jit
def _nucleus(kept, count, best, temperature, target, BLOCK: tl.constexpr):
    """Return the least key of the shortest prefix with the weight `target`, and how many have that key in
    it.
    """
    least, bit = tl.zeros((1,), tl.uint32), tl.full((1,), 2147483648, tl.uint32)
    for _ in range(32):
        tried = least | bit
        reached = _weight_above(kept, count, best, temperature, tried, BLOCK) >= target
        least, bit = tl.where(reached, tried, least), bit >> 1
    greater = _weight_above(kept, count, best, temperature, least.to(tl.uint64) + 1, BLOCK)
    least = tl.max(least, 0)
    own = tl.zeros((1,), tl.float64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(kept + at, mask=at < count, other=float("-inf"))
        same = (at < count) & (_key(x) == least)
        own = tl.maximum(own, tl.max(tl.where(same, _weights(x, best, temperature), 0.0), 0))
    own = tl.max(own, 0)
    number = tl.ceil((target - greater) / tl.where(own > 0, own, 1.0))
    return least, tl.where(own > 0, tl.maximum(number, 1.0), 2147483647.0).to(tl.int32)


@triton.jit
def _drawn(kept, kept_ids, count, best, temperature, key_least, equal_left, u, BLOCK: tl.constexpr):
    """Return the token at `u` times the sum of the weights in the nucleus, laid end to end by id."""
    token = 0 * count - 1
    target = tl.zeros((1,), tl.float64)
    for search in tl.static_range(2):  # first the sum, then the token, by the same sums
        total, equal = tl.zeros((1,), tl.float64), 0 * count
        for begin in range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(kept + at, mask=at < count, other=float("-inf"))
            key = _key(x)
            same = ((key == key_least) & (at < count)).to(tl.int32)
            chosen = (at < count) & (
                (key > key_least) | ((same > 0) & (equal + tl.cumsum(same, 0) <= equal_left))
            )
            weights = tl.where(chosen, _weights(x, best, temperature), 0.0)
            sums = total + tl.cumsum(weights, 0)
            if search == 1:
                hit = chosen & (sums > target)
                first = tl.min(tl.where(hit, at, 2147483647), 0)
                found = tl.load(kept_ids + first, mask=first < count, other=-1)
                token = tl.where(token < 0, found, token)
            total = tl.max(sums, 0) + tl.zeros((1,), tl.float64)
            equal += tl.sum(same, 0)
        target = u * total
    return token


@triton.jit
def _uniform(seed, sequence, position):
    """Return the number in [0, 1) of quire.sampling.philox.uniform, with its bits."""
    low = (position + tl.zeros((1,), tl.int32)).to(tl.uint32, bitcast=True)
    lane = (sequence + tl.zeros((1,), tl.int32)).to(tl.uint32, bitcast=True)
    none = tl.zeros((1,), tl.uint32)
    high_word, low_word, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low, none, lane, none)
    bits = (high_word >> 5).to(tl.uint64) * 67108864 + (low_word >> 6).to(tl.uint64)
    return tl.max(bits.to(tl.float64) * 1.1102230246251565e-16, 0)


@triton.jit
def _fault(raw, raw_invalid, edited, edited_invalid):
    """Return the number of the fault of a row, 0 if there is none, by the greatest logits and NaNs."""
    infinity = float("inf")
    only = tl.where(raw == -infinity, ONLY_MINUS_INF, tl.where(raw == infinity, INFINITE, 0))
    after = tl.where(edited == -infinity, EXCLUDED, tl.where(edited == infinity, TOO_LARGE, 0))
    after = tl.where(edited_invalid > 0, TOO_LARGE, after)
    return tl.where(raw_invalid > 0, NAN, tl.where(only > 0, only, after))


@triton.jit
def choose_tokens(
    tokens,
    faults,
    logits,
    rows,
    edited,
    edited_rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    sequences,
    positions,
    kept,
    kept_ids,
    vocab,
    BLOCK: tl.constexpr,
):
    """tokens[s], faults[s] int32 = the token drawn from row rows[s] of logits [L, vocab], and its fault (of
    FAULTS) or 0.

    Row edited_rows[s] of `edited` has the logits after steps 2 to 9 of the pipeline. By s: temperatures,
    top_ps, min_ps float64, top_ks int32 (0 or less: none), seeds int64, sequences int32 and positions int32
    for the random draw. kept float32 and kept_ids int32 [S, vocab] are scratch. Grid (S,). Reads a row twice
    for greedy rows, otherwise three times and four more for top-k; the others read only candidates.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    edited += tl.load(edited_rows + row).to(tl.int64) * vocab
    kept, kept_ids = kept + row * vocab, kept_ids + row * vocab
    raw, _, raw_invalid = _survey(logits, vocab, BLOCK)
    best, token, invalid = _survey(edited, vocab, BLOCK)
    fault = _fault(raw, raw_invalid, best, invalid)
    tl.store(faults + row, fault)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (fault == 0):
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        limited = (top_k > 0) & (top_k < vocab)
        least, equal_left = tl.zeros((1,), tl.uint32), vocab
        if limited:
            key, equal_left = _kth_greatest(edited, vocab, top_k, BLOCK)
            least = key + tl.zeros((1,), tl.uint32)
        least = tl.max(least, 0)
        count, total = _keep(
            kept, kept_ids, edited, vocab, best, temperature, min_p, 0.0, least, equal_left, BLOCK
        )
        if (top_p < 1) & (not limited):  # lighter ones together have less than half of what top-p drops
            lightest = 0.5 * (1.0 - top_p) * total / vocab
            count, total = _keep(
                kept, kept_ids, edited, vocab, best, temperature, min_p, lightest, least, equal_left, BLOCK
            )
        least, equal_left = tl.zeros((1,), tl.uint32), vocab
        if top_p < 1:
            key, equal_left = _nucleus(kept, count, best, temperature, top_p * total, BLOCK)
            least = key + tl.zeros((1,), tl.uint32)
        u = _uniform(tl.load(seeds + row), tl.load(sequences + row), tl.load(positions + row))
        token = _drawn(kept, kept_ids, count, best, temperature, tl.max(least, 0), equal_left, u, BLOCK)
    tl.store(tokens + row, token)
