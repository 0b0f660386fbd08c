"""Norms over the last axis, alone or of a residual sum."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def rms_norm(
    out, total, x, y, weight, width, eps, offset, ADD: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """out = s / sqrt(mean(s^2) + eps) * (weight + offset), s = x, or x + y, which is kept in `total`, if ADD.

    x, y, total, out [rows, width]; weight [width], without WEIGHT as if it were ones. Grid (rows,). Reads x
    (and y) twice, the second time from the cache, and writes out (and total); 4 operations a number. The sum
    is over BLOCK lanes, each adding every BLOCK-th number in order, then over the lanes: the order depends on
    the width alone, as BLOCK and the number of warps are the same for every launch.
    """
    first = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + first + begin + lane, s, mask=inside)
        squares += s * s
    mean = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    root = tl.sqrt_rn(mean + eps)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        normed = tl.div_rn(s, root)
        if WEIGHT:
            normed *= tl.load(weight + begin + lane, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(out + first + begin + lane, normed, mask=inside)


@triton.jit
def layer_norm(
    out,
    total,
    x,
    y,
    weight,
    bias,
    width,
    eps,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (s - mean) / sqrt(var + eps) * weight + bias, with s, grid and sums as in rms_norm.

    Reads x (and y) three times, twice from the cache; 7 operations a number.
    """
    first = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + first + begin + lane, s, mask=inside)
        sums += s
    mean = tl.div_rn(tl.sum(sums, 0), width.to(tl.float32))
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, s - mean, 0.0)
        squares += apart * apart
    root = tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), width.to(tl.float32)) + eps)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        normed = tl.div_rn(s - mean, root)
        if WEIGHT:
            normed *= tl.load(weight + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            normed += tl.load(bias + begin + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + first + begin + lane, normed, mask=inside)
