"""Weights rounded to Int8 and Int4 on the accelerator, with the bits of quire.quantize.round_to_nearest.

x are rows of floats [rows, width]; those of the weight are written from row `first` on, in the layout of
quire.backends.cuda.packing. A weight of several matrices has `outputs` rows in each. All operations are
float32 and rounded one by one, in the order of that definition; sums of squared errors run over the 32
numbers of a group in order.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.rounding import is_finite, to_nearest
from quire.backends.cuda.kernels.tiles import padded

GROUP, GROUPS = tl.constexpr(32), tl.constexpr(4)  # inputs of a group, groups of a span
CANDIDATES = tl.constexpr(5)


@triton.jit
def scale_channels(channels, x, first, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """channels = the largest magnitude of each row / 127 (of 4 bits / 7) / 127, NaN if one is not finite.

    Grid (rows,). Reads x once; a maximum has no order.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tops, finite = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), 1, tl.int32)
    for begin in range(0, width, BLOCK):
        numbers = tl.load(x + row * width + begin + at, mask=begin + at < width, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.where(is_finite(numbers), tl.abs(numbers), 0.0))
        finite &= is_finite(numbers).to(tl.int32)
    channel = tl.div_rn(tl.div_rn(tl.max(tops, 0), 127.0 if BITS == 8 else 7.0), 127.0)
    channel = tl.where(channel < 1.1754943508222875e-38, 0.0, channel)
    tl.store(channels + first + row, tl.where(tl.min(finite, 0) > 0, channel, float("nan")))


@triton.jit
def _number(x_row, group, k, width, inside):
    """Return number k of groups of rows, 0 after the end of a row."""
    at = group * GROUP + k
    return tl.load(x_row + at, mask=inside & (at < width), other=0.0).to(tl.float32)


@triton.jit
def _integer(number, inverse, BITS: tl.constexpr):
    """Return the nearest integer to a number divided by a scale, as a float."""
    nearest = to_nearest(number * inverse)
    if BITS == 8:
        return tl.minimum(tl.maximum(nearest, -127.0), 127.0)
    else:
        return tl.minimum(tl.maximum(nearest, -8.0), 7.0)


@triton.jit
def _inverse(scale):
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def _candidate(which, top, largest, unit, BITS: tl.constexpr):
    """Return a candidate for the block scales of groups, by their numbers of the largest magnitude."""
    safe = tl.where(unit == 0.0, 1.0, unit)
    if BITS == 8:
        least = tl.minimum(tl.ceil(tl.div_rn(tl.div_rn(top, 127.0), safe)), 127.0)
        step = tl.where(which == 0, 0.0, tl.where(which == 1, -1.0, which.to(tl.float32) - 1.0))
        scale = tl.minimum(tl.maximum(least + step, 1.0), 127.0)
        return tl.where((top == 0.0) | (unit == 0.0), 0.0, scale)
    else:
        factor = tl.where(which == 0, 1.0, tl.where(which == 1, 0.95, tl.where(which == 2, 8 / 7, 0.9)))
        factor = tl.where(which == 4, -1.0, factor)
        scale = to_nearest(tl.div_rn(factor * tl.div_rn(largest, -8.0), safe))
        scale = tl.minimum(tl.maximum(scale, -127.0), 127.0)
        scale = tl.where(scale == 0.0, tl.where(top > 0.0, 1.0, 0.0), scale)
        return tl.where(unit == 0.0, 0.0, scale)


@triton.jit
def _block_scale(x_row, group, width, inside, unit, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the block scale of groups: the first candidate with the least squared error."""
    top, largest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for k in range(GROUP):
        number = _number(x_row, group, k, width, inside)
        larger = tl.abs(number) > top
        top, largest = tl.where(larger, tl.abs(number), top), tl.where(larger, number, largest)
    best, least = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    for which in range(CANDIDATES):
        candidate = _candidate(which + tl.zeros((BLOCK,), tl.int32), top, largest, unit, BITS)
        scale, error = unit * candidate, tl.zeros((BLOCK,), tl.float32)
        inverse = _inverse(scale)
        for k in range(GROUP):
            number = _number(x_row, group, k, width, inside)
            rest = number - scale * _integer(number, inverse, BITS)
            error += rest * rest
        better = (error < least) | (which == 0)
        best, least = tl.where(better, candidate, best), tl.where(better, error, least)
    return best


@triton.jit
def round_groups(
    values,
    scales,
    channels,
    x,
    first,
    rows,
    width,
    outputs,
    spans,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round BLOCK groups (of 4 bits pairs of groups) a program to integers and block scales.

    `channels` are known. Grid (rows * groups or pairs of a row / BLOCK,). Reads x seven times, nearly always
    from the first-level cache; about 60 operations a number.
    """
    of_row = spans * (GROUPS if BITS == 8 else GROUPS // 2)
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, piece, inside = lane // of_row, lane % of_row, lane < rows.to(tl.int64) * of_row
    unit = tl.load(channels + first + row, mask=inside, other=0.0)
    x_row, whole = x + row * width, first + row
    matrix, output = whole // outputs, whole % outputs
    across = padded(outputs)
    scales_at = scales + matrix * (spans * GROUPS) * across + output
    if BITS == 8:
        scale = _block_scale(x_row, piece, width, inside, unit, BITS, BLOCK)
        tl.store(scales_at + piece * across, scale.to(tl.int8), mask=inside)
        inverse, at = _inverse(unit * scale), values + whole * (spans * GROUPS * GROUP) + piece * GROUP
        for k in range(GROUP):
            integer = _integer(_number(x_row, piece, k, width, inside), inverse, BITS)
            tl.store(at + k, integer.to(tl.int8), mask=inside)
    else:
        low, high = piece * 2, piece * 2 + 1
        low_scale = _block_scale(x_row, low, width, inside, unit, BITS, BLOCK)
        high_scale = _block_scale(x_row, high, width, inside, unit, BITS, BLOCK)
        tl.store(scales_at + low * across, low_scale.to(tl.int8), mask=inside)
        tl.store(scales_at + high * across, high_scale.to(tl.int8), mask=inside)
        inverse, of_high = _inverse(unit * low_scale), _inverse(unit * high_scale)
        at = values + whole * (spans * GROUPS * GROUP // 2) + piece * GROUP
        for k in range(GROUP):
            code = (_integer(_number(x_row, low, k, width, inside), inverse, BITS) + 8.0).to(tl.int32)
            above = (_integer(_number(x_row, high, k, width, inside), of_high, BITS) + 8.0).to(tl.int32)
            tl.store(at + k, (code | (above << 4)).to(tl.uint8), mask=inside)
