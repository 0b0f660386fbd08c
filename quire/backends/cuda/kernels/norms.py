"""Norms over the last axis, alone or of a residual sum."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate

_STAGES = tl.constexpr(4)  # of loops over a row: a step of one token has one program, which would wait


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
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + first + begin + lane, s, mask=inside)
        squares += s * s
    mean = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    root = tl.sqrt_rn(mean + eps)
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
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
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + first + begin + lane, s, mask=inside)
        sums += s
    mean = tl.div_rn(tl.sum(sums, 0), width.to(tl.float32))
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += tl.load(y + first + begin + lane, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, s - mean, 0.0)
        squares += apart * apart
    root = tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), width.to(tl.float32)) + eps)
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
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


@triton.jit
def gated_rms_norm(
    out,
    x,
    gate,
    weight,
    width,
    groups,
    eps,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x / sqrt(mean(x^2) + eps) * weight * activation(gate), as ops.GatedRMSNorm.

    x, gate, out [rows, groups * width], weight [groups * width]: a norm of each group. Grid (rows * groups,).
    With GATE_FIRST x is multiplied by activation(gate) before its norm instead. Sums as in rms_norm.
    """
    first = tl.program_id(0).to(tl.int64) * width
    own_weight = weight + tl.program_id(0) % groups * width
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0)
        if GATE_FIRST:
            s *= activate(tl.load(gate + first + begin + lane, mask=inside, other=0.0), ACTIVATION)
        squares += s * s
    root = tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), width.to(tl.float32)) + eps)
    for begin in tl.range(0, width, BLOCK, num_stages=_STAGES):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0)
        gates = activate(tl.load(gate + first + begin + lane, mask=inside, other=0.0), ACTIVATION)
        if GATE_FIRST:
            s *= gates
        normed = tl.div_rn(s, root) * tl.load(own_weight + begin + lane, mask=inside, other=0.0)
        if not GATE_FIRST:
            normed *= gates
        tl.store(out + first + begin + lane, normed, mask=inside)


@triton.jit
def match_magnitude(out, x, like, floor, width, BLOCK: tl.constexpr):
    """out = x * sqrt(mean(like^2) / max(mean(x^2), floor)), x, like, out [rows, width]; floor is a float64.

    Grid (rows,). The factor is computed in float64. Reads x twice and `like` once.
    """
    first = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    own, other = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float64)
        t = tl.load(like + first + begin + lane, mask=inside, other=0.0).to(tl.float64)
        own += s * s
        other += t * t
    mean = tl.maximum(tl.sum(own, 0) / width, tl.load(floor), propagate_nan=tl.PropagateNan.ALL)
    factor = tl.sqrt(tl.sum(other, 0) / width / mean).to(tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        s = tl.load(x + first + begin + lane, mask=inside, other=0.0)
        tl.store(out + first + begin + lane, s * factor, mask=inside)


@triton.jit
def above_cutoff(out, x, deviations, width, BLOCK: tl.constexpr):
    """out = max(0, x - mean - deviations * (standard deviation)) of rows x, out [rows, width].

    deviations is a float64, and the cutoff is computed in it. Grid (rows,). Reads x three times.
    """
    first = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        sums += tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float64)
    mean = tl.sum(sums, 0) / width
    squares = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        apart = tl.load(x + first + begin + lane, mask=inside, other=0.0).to(tl.float64) - mean
        squares += tl.where(inside, apart * apart, 0.0)
    cutoff = (mean + tl.load(deviations) * tl.sqrt(tl.sum(squares, 0) / width)).to(tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lane < width
        apart = tl.load(x + first + begin + lane, mask=inside, other=0.0) - cutoff
        tl.store(out + first + begin + lane, tl.maximum(apart, 0.0, tl.PropagateNan.ALL), mask=inside)
