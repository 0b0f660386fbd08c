"""Vision towers: positions, rotation by place, means of patches; and the places of images among tokens.

All sums are of one row, in order.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def mixed_rows(out, places, table, width, number, BLOCK: tl.constexpr):
    """out[t] = the sum of w[j] * table[i[j]] over j: places [T, 2 number] are i, whole numbers, then w.

    Grid (T, width / BLOCK). Reads `number` rows of the table [rows, width] for each token.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = column < width, tl.zeros((BLOCK,), tl.float32)
    at = places + token * (2 * number)
    for j in range(number):
        row, factor = tl.load(at + j).to(tl.int64), tl.load(at + number + j)
        own = factor * tl.load(table + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(j == 0, own, total + own)
    tl.store(out + token * width + column, total, mask=inside)


@triton.jit
def rotate_at(out, x, places, frequencies, heads, size, axes, HALF: tl.constexpr):
    """out = x [T, heads, size] with pairs rotated by places [T, axes], as ops.RotaryAt.

    frequencies [size / 2 / axes] are radians per place. Angles are rounded to float32, their cosine and sine
    from float64. Grid (T,). Reads and writes each number once; a program has all heads of a token.
    """
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    half = size // 2
    inside, of_axis = pair < half, half // axes
    place = tl.load(places + token * axes + pair // of_axis, mask=inside, other=0.0)
    angle = (place * tl.load(frequencies + pair % of_axis, mask=inside, other=0.0)).to(tl.float64)
    c, s = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
    for head in range(heads):
        at = (token * heads + head) * size + pair
        a = tl.load(x + at, mask=inside, other=0.0)
        b = tl.load(x + at + half, mask=inside, other=0.0)
        tl.store(out + at, a * c - b * s, mask=inside)
        tl.store(out + at + half, b * c + a * s, mask=inside)


@triton.jit
def resize_rows(out, x, width, new_width, BLOCK: tl.constexpr):
    """out [rows, new_width] = x [rows, width] in the format of out, cut off or followed by zeros.

    Grid (rows, new_width / BLOCK). Reads and writes each number once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < new_width
    values = tl.load(x + row * width + column, mask=inside & (column < width), other=0.0)
    tl.store(out + row * new_width + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mean_rows(out, x, width, number, BLOCK: tl.constexpr):
    """out[l] = the mean of rows l * number ... of x, `number` of them, summed in float64.

    Grid (L, width / BLOCK). Reads each number once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, sums = column < width, tl.zeros((BLOCK,), tl.float64)
    for j in range(number):
        at = x + (row * number + j) * width + column
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float64)
    mean = sums / tl.full((BLOCK,), number, tl.int32).to(tl.float64)
    tl.store(out + row * width + column, mean.to(tl.float32), mask=inside)


@triton.jit
def place_images(out, x, addresses, width, first, added, BLOCK: tl.constexpr):
    """out = x [T, width], but numbers `first` ... of the embeddings of images; if `added`, x plus these.

    addresses [T] int64 are those of the float32 embeddings of tokens, 0 for tokens of no image. Grid
    (T, width / BLOCK). Reads and writes each number once.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, address = column < width, tl.load(addresses + token)
    seen = inside & (address != 0)
    values = tl.load(x + token * width + column, mask=inside, other=0.0)
    own = tl.load(address.to(tl.pointer_type(tl.float32)) + first + column, mask=seen, other=0.0)
    own = tl.where(added > 0, values + own, own)
    tl.store(out + token * width + column, tl.where(seen, own, values), mask=inside)


@triton.jit
def replace_tokens(out, tokens, count, replaced, same, BLOCK: tl.constexpr):
    """out = tokens [count], with `same` in place of `replaced`. Grid (count / BLOCK,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    own = tl.load(tokens + at, mask=inside, other=0)
    tl.store(out + at, tl.where(own == replaced, same, own), mask=inside)


@triton.jit
def clip(out, x, low, high, width, BLOCK: tl.constexpr):
    """out = min(max(x, low), high), bounds [1]; NaN stays. Grid (rows, width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values, least, most = tl.load(x + row + column, mask=inside, other=0.0), tl.load(low), tl.load(high)
    values = tl.where(values < least, least, values)
    tl.store(out + row + column, tl.where(values > most, most, values), mask=inside)


@triton.jit
def standardize(out, x, bias, factors, width, BLOCK: tl.constexpr):
    """out = (x - bias) * factors, both [width]. Grid (rows, width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row + column, mask=inside, other=0.0) - tl.load(
        bias + column, mask=inside, other=0.0
    )
    factor = tl.load(factors + column, mask=inside, other=0.0)
    tl.store(out + row + column, values * factor, mask=inside)
