"""From a row of logits to a token, as docs/sampling.md defines it, without a sort of the vocabulary.

One program computes a row, from what others found in its parts (`survey_logits`), so nothing depends on other
rows. Its loops load the next blocks ahead. Weights and their sums are float64: a sum is
over the lanes of a block, then over the blocks of the row in order. Counts are integers, thresholds are found
in the bits of the logits. So the token is a function of the row and its parameters alone; it is that of the
definition unless `u` or `top_p` is within about 1e-14 of a boundary between two tokens.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

ONLY_MINUS_INF, NAN, INFINITE, EXCLUDED, TOO_LARGE = (tl.constexpr(i) for i in range(1, 6))  # of FAULTS
_BINS = tl.constexpr(256)
_STAGES = tl.constexpr(4)  # of loops over a row
_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _key(logits):
    """Return uint32 keys in the order of logits; 0 and -0 are equal."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 2147483647) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _no_key():
    """Return the least key."""
    return tl.max(tl.zeros((1,), tl.uint32), 0)


@triton.jit
def survey_logits(tops, firsts, logits, rows, vocab, BLOCK: tl.constexpr):
    """tops, firsts [S, parts] = the greatest of each BLOCK logits of row rows[s], its first token.

    tops is NaN if one of them is. Grid (S, parts). Reads each row once.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
    invalid = tl.max((x != x).to(tl.int32), 0)
    top = tl.max(tl.where(x != x, float("-inf"), x), 0)
    place = row * tl.num_programs(1) + part
    tl.store(tops + place, tl.where(invalid > 0, float("nan"), top))
    tl.store(firsts + place, tl.min(tl.where(x == top, at, _NO_TOKEN), 0))


@triton.jit
def _surveyed(tops, firsts, parts, PARTS: tl.constexpr):
    """Return the greatest logit of a row, the first token that has it, and the number of parts with NaN."""
    at = tl.arange(0, PARTS)
    x = tl.load(tops + at, mask=at < parts, other=float("-inf"))
    best = tl.max(tl.where(x != x, float("-inf"), x), 0)
    own = tl.load(firsts + at, mask=(at < parts) & (x == best), other=_NO_TOKEN)
    return best, tl.min(own, 0), tl.sum((x != x).to(tl.int32), 0)


@triton.jit
def _kth_greatest_top(tops, parts, k, PARTS: tl.constexpr):
    """Return the key of the k-th greatest logit among those that are the greatest of a part, 0 for fewer.

    So at least k logits of the row have this key or a greater one, and seldom many more.
    """
    at = tl.arange(0, PARTS)
    keys = _key(tl.load(tops + at, mask=at < parts, other=float("-inf")))
    least, bit = tl.zeros((1,), tl.uint32), tl.full((1,), 2147483648, tl.uint32)
    for _ in range(32):
        tried = least | bit
        enough = tl.sum(((keys >= tried) & (at < parts)).to(tl.int32), 0) >= k
        least, bit = tl.where(enough, tried, least), bit >> 1
    return tl.max(least, 0)


@triton.jit
def _gather(kept, kept_ids, logits, vocab, key_least, BLOCK: tl.constexpr):
    """Write the logits with at least this key, and their tokens, in order of id; return their number."""
    count = 0 * vocab
    for begin in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        chosen = (at < vocab) & (_key(x) >= key_least)
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kept + place, x, mask=chosen)
        tl.store(kept_ids + place, at, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of the program read what was written
    return count


@triton.jit
def _weights(x, best, temperature):
    """Return exp((x - best) / temperature) in float64."""
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) / temperature)


@triton.jit
def weigh_logits(
    sums,
    tops,
    firsts,
    logits,
    rows,
    temperatures,
    min_ps,
    vocab,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums float64 [S, parts] = the weight of each BLOCK logits of row rows[s], of those that min-p keeps.

    tops and firsts are those of survey_logits; rows without a temperature have no weights. Grid (S, parts).
    Reads each row once.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        best, _, _ = _surveyed(tops + row * parts, firsts + row * parts, parts, PARTS)
        logits += tl.load(rows + row).to(tl.int64) * vocab
        weights = _part_weights(logits, part, vocab, best, temperature, tl.load(min_ps + row), BLOCK)
        tl.store(sums + row * parts + part, tl.sum(weights, 0))


@triton.jit
def _part_weights(logits, part, vocab, best, temperature, min_p, BLOCK: tl.constexpr):
    """Return the weights of a part, 0 for those that min-p does not keep."""
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
    weights = _weights(x, best, temperature)
    return tl.where((at < vocab) & (weights >= min_p), weights, 0.0)


@triton.jit
def _drawn_of_all(
    sums, logits, vocab, parts, best, temperature, min_p, u, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the token at `u` times the sum of all weights that min-p keeps, laid end to end by id."""
    at = tl.arange(0, PARTS)
    ends = tl.cumsum(tl.load(sums + at, mask=at < parts, other=0.0), 0)
    target = u * tl.max(ends, 0)
    part = tl.min(tl.where(ends > target, at, parts - 1), 0)
    before = tl.max(tl.where(at < part, ends, 0.0), 0)
    weights = _part_weights(logits, part, vocab, best, temperature, min_p, BLOCK)
    lane = tl.arange(0, BLOCK)
    hit = (weights > 0) & (before + tl.cumsum(weights, 0) > target)
    last = tl.max(tl.where(weights > 0, lane, 0), 0)  # if the sums of the part end earlier, by their order
    return part * BLOCK + tl.minimum(tl.min(tl.where(hit, lane, BLOCK), 0), last)


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
        for begin in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
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
    gathered,
    best,
    temperature,
    min_p,
    lightest,
    key_least,
    equal_left,
    BLOCK: tl.constexpr,
):
    """Keep the candidates of `gathered` ones, in order; return their number, and the weight that min-p keeps.

    Candidates have a key above key_least, or are among the first equal_left that have it, and a weight of at
    least min_p and `lightest`. They are written over those that were read, and over none of a later block.
    """
    count, equal = 0 * gathered, 0 * gathered
    total = tl.zeros((1,), tl.float64)
    for begin in tl.range(0, gathered, BLOCK, num_stages=_STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(kept + at, mask=at < gathered, other=float("-inf"))
        ids = tl.load(kept_ids + at, mask=at < gathered, other=0)
        key = _key(x)
        same = ((key == key_least) & (at < gathered)).to(tl.int32)
        number = equal + tl.cumsum(same, 0)
        ranked = (at < gathered) & ((key > key_least) | ((same > 0) & (number <= equal_left)))
        weights = _weights(x, best, temperature)
        ranked = ranked & (weights >= min_p)
        total += tl.sum(tl.where(ranked, weights, 0.0), 0)
        chosen = ranked & (weights >= lightest)
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kept + place, x, mask=chosen)
        tl.store(kept_ids + place, ids, mask=chosen)
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
        for begin in tl.range(0, count, BLOCK, num_stages=_STAGES):
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
def _drawn_of_kept(kept, kept_ids, count, best, temperature, top_p, total, u, BLOCK: tl.constexpr):
    """Return the token at `u` times the sum of the weights of candidates, or of the nucleus, end to end."""
    least, equal_left = _no_key(), 0 * count + _NO_TOKEN
    if top_p < 1:
        least, equal_left = _nucleus(kept, count, best, temperature, top_p * total, BLOCK)
    return _drawn(kept, kept_ids, count, best, temperature, least, equal_left, u, BLOCK)


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
    raw_tops,
    tops,
    firsts,
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    sequences,
    positions,
    sums,
    kept,
    kept_ids,
    vocab,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tokens[s], faults[s] int32 = the token drawn from row rows[s] of logits [L, vocab], and 0, or 0 and
    its fault (of FAULTS).

    The logits are those after steps 2 to 9 of the pipeline, tops and firsts [S, parts] what survey_logits
    found in them, and raw_tops in those before. By s: temperatures, top_ps, min_ps float64, top_ks int32 (0
    or less: none), seeds int64, sequences int32 and positions int32 for the random draw. kept float32 and
    kept_ids int32 [S, vocab] are scratch. Grid (S,). Reads a row once for top-k and top-p: candidates are
    bounded by the greatest logits of parts, or by their weights (`sums`, of weigh_logits); else one part.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * vocab
    kept, kept_ids = kept + row * vocab, kept_ids + row * vocab
    tops, firsts, sums = tops + row * parts, firsts + row * parts, sums + row * parts
    raw, _, raw_invalid = _surveyed(raw_tops + row * parts, firsts, parts, PARTS)
    best, token, invalid = _surveyed(tops, firsts, parts, PARTS)
    fault = _fault(raw, raw_invalid, best, invalid)
    tl.store(faults + row, fault)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (fault == 0):
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        u = _uniform(tl.load(seeds + row), tl.load(sequences + row), tl.load(positions + row))
        limited = (top_k > 0) & (top_k < vocab)
        if limited | (top_p < 1):
            if limited:
                least = _kth_greatest_top(tops, parts, top_k, PARTS)
                count = _gather(kept, kept_ids, logits, vocab, least, BLOCK)
                least, equal_left = _kth_greatest(kept, count, top_k, BLOCK)
                count, total = _keep(
                    kept, kept_ids, count, best, temperature, min_p, 0.0, least, equal_left, BLOCK
                )
            else:
                at = tl.arange(0, PARTS)
                total = tl.sum(tl.load(sums + at, mask=at < parts, other=0.0), 0)
                lightest = 0.5 * (1.0 - top_p) * total / vocab  # together less than half of what top-p drops
                bound = best.to(tl.float64) + temperature * tl.log(tl.maximum(lightest, min_p))
                bound -= 1e-6 * (temperature + tl.abs(bound))  # candidates are those whose weight is compared
                least = tl.max(_key(bound.to(tl.float32) + tl.zeros((1,), tl.float32)), 0)
                count = _gather(kept, kept_ids, logits, vocab, least, BLOCK)
                count, _own_total = _keep(
                    kept, kept_ids, count, best, temperature, min_p, lightest, _no_key(), vocab, BLOCK
                )
            token = _drawn_of_kept(kept, kept_ids, count, best, temperature, top_p, total, u, BLOCK)
        else:
            token = _drawn_of_all(sums, logits, vocab, parts, best, temperature, min_p, u, PARTS, BLOCK)
    tl.store(tokens + row, tl.where(fault == 0, token, 0))
