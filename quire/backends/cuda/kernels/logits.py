"""Changes of logits before a token is drawn: steps 2 to 9 of docs/sampling.md, and the counts they need.

In three launches: masks, then listed tokens, then penalties. A bias comes before masks in the definition: but
minus infinity plus a bias is minus infinity, so the order of these two changes no bit.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def mask_logits(out, logits, rows, masks, mask_rows, vocab, words, BLOCK: tl.constexpr):
    """out[s] = logits[rows[s]], minus infinity for tokens without a bit in row mask_rows[s] of masks.

    logits float32 [L, vocab], out [S, vocab]; masks uint32 [n, words], lowest bit first; -1 in mask_rows
    int32 [S] is no mask. Grid (S, vocab / BLOCK). Reads and writes each logit once.
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, own = token < vocab, tl.load(mask_rows + row).to(tl.int64)
    x = tl.load(logits + tl.load(rows + row).to(tl.int64) * vocab + token, mask=inside, other=0.0)
    masked = inside & (own >= 0)
    word = tl.load(masks + own * words + token // 32, mask=masked, other=0)
    allowed = ((word >> (token % 32).to(tl.uint32)) & 1) > 0
    tl.store(out + row * vocab + token, tl.where(masked & ~allowed, float("-inf"), x), mask=inside)


@triton.jit
def bias_logits(logits, rows, tokens, biases, count, vocab, BLOCK: tl.constexpr):
    """logits[rows[i], tokens[i]] += biases[i], in place, for each of `count` entries; minus infinity
    excludes.

    rows and tokens int32, biases float32 [count]. An entry is listed once, or several times as excluded. Grid
    (count / BLOCK,).
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    at = tl.load(rows + entry, mask=inside, other=0).to(tl.int64) * vocab
    at += tl.load(tokens + entry, mask=inside, other=0)
    x = tl.load(logits + at, mask=inside, other=0.0) + tl.load(biases + entry, mask=inside, other=0.0)
    tl.store(logits + at, x, mask=inside)


@triton.jit
def penalize_logits(
    logits,
    slots,
    seen,
    output_counts,
    drafted,
    firsts,
    repetitions,
    frequencies,
    presences,
    vocab,
    BLOCK: tl.constexpr,
):
    """Apply repetition, frequency and presence penalties to logits [L, vocab], in place.

    By slot (slots int32 [L]): seen int8 and output_counts int32 [slots, vocab], to which the tokens
    drafted[firsts[l] : firsts[l + 1]] int32 of a row are added. By row: repetitions float64 (1: none),
    frequencies and presences float32 (0: none). Grid (L, vocab / BLOCK). Each is a float32 operation of its
    own, that of repetition in float64 and rounded once, as in the definition.
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = token < vocab, tl.load(slots + row).to(tl.int64)
    x = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    penalty = tl.load(repetitions + row)
    repeated = inside & (penalty != 1)
    more = tl.zeros((BLOCK,), tl.int32)
    for entry in range(tl.load(firsts + row), tl.load(firsts + row + 1)):
        more += (tl.load(drafted + entry) == token).to(tl.int32)
    was_seen = (tl.load(seen + slot * vocab + token, mask=repeated, other=0) + more) > 0
    was_seen = was_seen & repeated
    wide = x.to(tl.float64)
    x = tl.where(was_seen, tl.where(wide > 0, wide / penalty, wide * penalty).to(tl.float32), x)
    frequency, presence = tl.load(frequencies + row), tl.load(presences + row)
    counted = inside & ((frequency != 0) | (presence != 0))
    count = tl.load(output_counts + slot * vocab + token, mask=counted, other=0) + more
    x -= frequency * count.to(tl.float32)
    x -= presence * (count > 0).to(tl.float32)
    tl.store(logits + row * vocab + token, x, mask=inside)


@triton.jit
def count_tokens(seen, output_counts, slots, tokens, count, vocab, BLOCK: tl.constexpr):
    """Record tokens of slots, int32 [count] each: seen as 1, and one more in output_counts.

    Grid (count / BLOCK,). Counts are integers, so the order of atomic additions changes none.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    at = tl.load(slots + entry, mask=inside, other=0).to(tl.int64) * vocab
    at += tl.load(tokens + entry, mask=inside, other=0)
    tl.store(seen + at, tl.full((BLOCK,), 1, tl.int8), mask=inside)
    tl.atomic_add(output_counts + at, 1, mask=inside, sem="relaxed")


@triton.jit
def fit_logits(out, logits, vocab, width, BLOCK: tl.constexpr):
    """out [L, vocab] = logits [L, width], minus infinity for tokens beyond the width.

    Both float32. Grid (L, vocab / BLOCK). Reads and writes each logit once.
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row * width + token, mask=inside & (token < width), other=float("-inf"))
    tl.store(out + row * vocab + token, x, mask=inside)
