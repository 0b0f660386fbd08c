"""Products with weights of other formats by their codes, as quire.quantize.coded_product defines them.

Codes that are integers meet activations rounded to int8, with a scale for a span: 128 inputs, or 32 if codes
have more than 6 bits. A unit is UNIT inputs of a span and of a group. Its dot product is an exact integer;
units are added to the sum of a span, and spans to the result, in order and each with one rounding (fma). So
results equal the NumPy reference bit for bit, whatever the tile. Codes that are floats meet activations
rounded to bfloat16 (8-bit floats) or float32 (tables of floats), and a unit is a sum of float32 from 0.

coded_parts explains the arguments of weights and their constants.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.coded_parts import (
    GROUP,
    GROUPS,
    SPAN,
    floats_of,
    integers_of,
    numbers_of,
    plane_bytes,
    values_of,
)
from quire.backends.cuda.kernels.rounding import is_finite, to_nearest
from quire.backends.cuda.kernels.tiles import bits_of, row_tile


@triton.jit
def quantize_coded_rows(
    q, sums, scales, x, order, width, ordered, SPAN_INPUTS: tl.constexpr, UNIT: tl.constexpr
):
    """Quantize x [rows, width], by input order[j] at column j if `ordered`, as numerics.quantize_rows.

    q int8 [rows, spans * 128], sums of q int32 [rows, spans * 128 / UNIT], scales float32 [rows, spans *
    128 / SPAN_INPUTS]. Grid (rows, spans of 128). Reads x once, writes a quarter of its bytes.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    spans, group = tl.num_programs(1), tl.arange(0, GROUPS)
    column = span * SPAN + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    source = tl.load(order + column, mask=inside & (ordered != 0), other=0)
    source = tl.where(ordered != 0, source, column)
    values = tl.load(x + row * width + source, mask=inside, other=0.0)
    finite = tl.min(is_finite(values).to(tl.int32), 1)
    amax = tl.max(tl.where(is_finite(values), tl.abs(values), 0.0), 1)
    if SPAN_INPUTS == SPAN:
        amax = tl.max(amax, 0) + tl.zeros((GROUPS,), tl.float32)
        finite = tl.min(finite, 0) + tl.zeros((GROUPS,), tl.int32)
    inverse = tl.div_rn(tl.full((GROUPS,), 127.0, tl.float32), amax)
    inverse = tl.where(is_finite(inverse) & (finite > 0), inverse, 0.0)
    rounded = tl.where(inverse[:, None] > 0, to_nearest(values * inverse[:, None]), 0.0)
    scale = tl.where(finite > 0, tl.div_rn(amax, tl.full((GROUPS,), 127.0, tl.float32)), float("nan"))
    tl.store(q + row * spans * SPAN + column, rounded.to(tl.int8))
    units = tl.arange(0, SPAN // UNIT)
    of_units = tl.sum(tl.reshape(rounded.to(tl.int32), (SPAN // UNIT, UNIT)), 1)
    tl.store(sums + row * spans * (SPAN // UNIT) + span * (SPAN // UNIT) + units, of_units)
    if SPAN_INPUTS == SPAN:
        tl.store(scales + row * spans + span, tl.max(scale, 0))
    else:
        tl.store(scales + (row * spans + span) * GROUPS + group, scale)


@triton.jit
def quantize_whole_rows(q, scales, x, width, spans, BLOCK: tl.constexpr):
    """Quantize x [rows, width] with one scale for each row: q int8 [rows, spans * 128], scales [rows].

    Grid (rows,). Reads x twice; maxima have no order.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tops, finite = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), 1, tl.int32)
    for begin in range(0, width, BLOCK):
        values = tl.load(x + row * width + begin + lane, mask=begin + lane < width, other=0.0)
        finite = tl.minimum(finite, is_finite(values).to(tl.int32))
        tops = tl.maximum(tops, tl.where(is_finite(values), tl.abs(values), 0.0))
    amax, all_finite = tl.max(tops, 0), tl.min(finite, 0) > 0
    inverse = tl.div_rn(127.0, amax)
    inverse = tl.where(is_finite(inverse) & all_finite, inverse, 0.0)
    for begin in range(0, spans * SPAN, BLOCK):
        values = tl.load(x + row * width + begin + lane, mask=begin + lane < width, other=0.0)
        rounded = tl.where(inverse > 0, to_nearest(values * inverse), 0.0)
        tl.store(q + row * spans * SPAN + begin + lane, rounded.to(tl.int8), mask=begin + lane < spans * SPAN)
    tl.store(scales + row, tl.where(all_finite, tl.div_rn(amax, 127.0), float("nan")))


@triton.jit
def _add_unit(
    total,
    dots,
    sums,
    values,
    column,
    weight,
    outputs,
    how,
    n,
    n_in,
    offset,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Return the sum of a span after the unit at an input, whose sums of x are at `sums` [BM].

    `values` are those of scales and minimums of two levels.
    """
    _, _, scales, scale_codes, minimums, minimum_codes = weight
    sums_at, m_in = sums
    where = (column, n, n_in, outputs, how)
    scale = numbers_of(scales, scale_codes, values[0], *where, TABLE, SCALES)
    dots = dots.to(tl.float32)
    if SHIFT != "":
        own = tl.load(sums_at, mask=m_in, other=0).to(tl.float32)
        own = tl.broadcast_to(own[:, None], (BM, BN))
        if BITS == 8:  # exact
            dots = dots - own * offset.to(tl.float32)
    total = tl.fma(dots, tl.broadcast_to(scale[None, :], (BM, BN)), total)
    if SHIFT == "zeros":
        zero = bits_of(minimums, column // how[0], n, n_in, outputs, 1) & 255
        minimum = -(scale * zero.to(tl.float32))
        total = tl.fma(own, tl.broadcast_to(minimum[None, :], (BM, BN)), total)
    elif SHIFT == "minimums":
        minimum = numbers_of(minimums, minimum_codes, values[1], *where, TABLE, SCALES)
        total = tl.fma(own, tl.broadcast_to(minimum[None, :], (BM, BN)), total)
    return total


@triton.jit
def _plane(plane, block, k, n_in):
    """Return 32 bytes of each row of a plane, [BN, 32]."""
    return tl.load(plane + block * GROUP + k[None, :], mask=n_in[:, None], other=0)


@triton.jit
def _code(below, above, part, BITS: tl.constexpr):
    """Return the codes of group `part` of a span from the bytes of their planes."""
    LOW: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    if LOW == 8:
        return below
    else:
        code = (below >> (part % (8 // LOW) * LOW)) & ((1 << LOW) - 1)
        if BITS > LOW:
            code = code | (((above >> (part * (BITS - LOW))) & ((1 << (BITS - LOW)) - 1)) << LOW)
        return code


@triton.jit
def _above(high, span, k, n_in, BITS: tl.constexpr):
    """Return the bytes of the high bits of a span; anything if codes have none."""
    if BITS == 6:
        return _plane(high, span, k, n_in)
    elif BITS == 5 or BITS == 3:
        byte = _plane(high, span // 2, k, n_in)
        return tl.where(span % 2 != 0, byte >> 4, byte)
    else:
        return span


@triton.jit
def integer_rows(
    x,
    weight,
    m,
    n,
    m_in,
    n_in,
    outputs,
    spans,
    how,
    offset,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return rows m of x, (integers, sums, scales), times outputs n of a weight whose codes are integers.

    `weight` are its arrays: low, high, scales, scale_codes, minimums, minimum_codes; `how` are group, block
    and brain. A step of the loop has AT_ONCE groups, whole units: more than fit the registers are slow.
    """
    LOW: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    q, sums, x_scales = x
    k, m, wide_n = tl.arange(0, GROUP), m.to(tl.int64), n[:, None].to(tl.int64)
    low = weight[0] + wide_n * plane_bytes(spans, LOW)
    high = weight[1] + wide_n * plane_bytes(spans, BITS - LOW)
    q_at = q + m[:, None] * (spans * SPAN) + k[None, :]
    sums_at = sums + m * (spans * (SPAN // UNIT))
    acc, total = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    STEPS: tl.constexpr = GROUPS // AT_ONCE
    for step in tl.range(0, spans if STEPS == 1 else spans * STEPS, num_stages=STAGES):
        span = step if STEPS == 1 else step // STEPS
        above = _above(high, span, k, n_in, BITS)
        of_scales = values_of(weight[2], span * SPAN, n, n_in, outputs, how, SCALES)
        if SHIFT == "minimums":
            values = (of_scales, values_of(weight[4], span * SPAN, n, n_in, outputs, how, SCALES))
        else:
            values = (of_scales, of_scales)
        for part in tl.static_range(AT_ONCE):
            column = span * SPAN + part * GROUP if STEPS == 1 else (step * AT_ONCE + part) * GROUP
            if part % (8 // LOW) == 0:
                below = _plane(low, (step * AT_ONCE + part) // (8 // LOW), k, n_in)
            own_part = part if STEPS == 1 else step * AT_ONCE - span * GROUPS + part
            code = _code(below, above, own_part, BITS)
            w = tl.trans(integers_of(code, offset, BITS, TABLE))
            a = tl.load(q_at + column, mask=m_in[:, None], other=0)
            if UNIT < GROUP:
                for unit in tl.static_range(GROUP // UNIT):
                    first = column + unit * UNIT
                    dots = tl.dot(tl.where((k // UNIT == unit)[None, :], a, 0), w, out_dtype=tl.int32)
                    own = (sums_at + first // UNIT, m_in)
                    total = _add_unit(
                        *(total, dots, own, values, first, weight, outputs, how, n, n_in, offset),
                        *(BITS, TABLE, SCALES, SHIFT, BM, BN),
                    )
            else:
                if part * GROUP % UNIT == 0:
                    dots = tl.dot(a, w, out_dtype=tl.int32)
                else:
                    dots = tl.dot(a, w, dots, out_dtype=tl.int32)
                if (part + 1) * GROUP % UNIT == 0:
                    first = column + GROUP - UNIT
                    own = (sums_at + first // UNIT, m_in)
                    total = _add_unit(
                        *(total, dots, own, values, first, weight, outputs, how, n, n_in, offset),
                        *(BITS, TABLE, SCALES, SHIFT, BM, BN),
                    )
            if BITS == 8:  # spans of activations are 32 inputs
                scale = tl.load(x_scales + m * (spans * GROUPS) + span * GROUPS + part, mask=m_in, other=0.0)
                acc = tl.fma(total, tl.broadcast_to(scale[:, None], (BM, BN)), acc)
                total = tl.zeros((BM, BN), tl.float32)
        if BITS != 8:
            scale = tl.load(x_scales + m * spans + span, mask=m_in, other=0.0)
            more = tl.fma(total, tl.broadcast_to(scale[:, None], (BM, BN)), acc)
            if STEPS == 1:
                acc, total = more, tl.zeros((BM, BN), tl.float32)
            else:
                last = (step + 1) * AT_ONCE == (span + 1) * GROUPS
                acc, total = tl.where(last, more, acc), tl.where(last, 0.0, total)
    return acc


@triton.jit
def whole_rows(x, weight, m, n, m_in, n_in, spans, BM: tl.constexpr, BN: tl.constexpr):
    """Return the same where rows and outputs have one scale each (W8A8), from one sum of integers."""
    q, _, x_scales = x
    k, m = tl.arange(0, SPAN), m.to(tl.int64)
    q_at = q + m[:, None] * (spans * SPAN) + k[None, :]
    low = weight[0] + n[:, None].to(tl.int64) * (spans * SPAN) + k[None, :]
    dots = tl.zeros((BM, BN), tl.int32)
    for span in range(spans):
        a = tl.load(q_at + span * SPAN, mask=m_in[:, None], other=0)
        w = tl.load(low + span * SPAN, mask=n_in[:, None], other=0).to(tl.int8, bitcast=True)
        dots = tl.dot(a, tl.trans(w), dots, out_dtype=tl.int32)
    own = tl.load(x_scales + m, mask=m_in, other=0.0)[:, None]
    return dots.to(tl.float32) * own * tl.load(weight[2] + n, mask=n_in, other=0.0)[None, :]


@triton.jit
def float_rows(
    x,
    weight,
    table,
    m,
    n,
    m_in,
    n_in,
    outputs,
    inputs,
    how,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return rows m of x float32 times outputs n of a weight whose codes are floats."""
    LOW: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    k, spans = tl.arange(0, GROUP), tl.cdiv(inputs, SPAN)
    low = weight[0] + n[:, None].to(tl.int64) * plane_bytes(spans, LOW)
    high = weight[1] + n[:, None].to(tl.int64) * plane_bytes(spans, BITS - LOW)
    x_at = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for span in tl.range(0, spans, num_stages=STAGES):
        above = _above(high, span, k, n_in, BITS)
        for part in tl.static_range(GROUPS):
            column = span * SPAN + part * GROUP
            if part % (8 // LOW) == 0:
                below = _plane(low, (span * GROUPS + part) // (8 // LOW), k, n_in)
            w = tl.trans(floats_of(_code(below, above, part, BITS), table, TABLE))
            a = tl.load(x_at + column, mask=m_in[:, None] & (column + k < inputs)[None, :], other=0.0)
            if part * GROUP % UNIT == 0:
                dots = tl.zeros((BM, BN), tl.float32)
            if TABLE == "floats":
                dots = tl.dot(a, w, dots, input_precision="ieee")
            else:
                dots = tl.dot(a.to(tl.bfloat16), w.to(tl.bfloat16), dots)
            if (part + 1) * GROUP % UNIT == 0:
                first = column + GROUP - UNIT
                scale = numbers_of(weight[2], weight[3], 0.0, first, n, n_in, outputs, how, TABLE, SCALES)
                acc = tl.fma(dots, tl.broadcast_to(scale[None, :], (BM, BN)), acc)
    return acc


@triton.jit
def coded_product(
    out,
    q,
    sums,
    x_scales,
    low,
    high,
    scales,
    scale_codes,
    minimums,
    minimum_codes,
    bias,
    rows,
    outputs,
    spans,
    group,
    block,
    brain,
    offset,
    biased,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr = 4,
    STAGES: tl.constexpr = 1,
):
    """out [rows, outputs] = quantized x times a weight transposed, plus a bias [outputs] if `biased`.

    q, sums and x_scales are those of quantize_coded_rows, or of quantize_whole_rows for TABLE "rows". Grid
    of row_tile. 2 * rows * outputs * inputs integer operations on tensor cores (twice as many for units of
    16); reads the weight once for BLOCK_M rows, STAGES - 1 steps ahead.
    """
    first = row_tile() * BLOCK_M
    if first < rows:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        m_in, n_in = m < rows, n < outputs
        x, weight = (q, sums, x_scales), (low, high, scales, scale_codes, minimums, minimum_codes)
        if TABLE == "rows":
            acc = whole_rows(x, weight, m, n, m_in, n_in, spans, BLOCK_M, BLOCK_N)
        else:
            acc = integer_rows(
                *(x, weight, m, n, m_in, n_in, outputs, spans, (group, block, brain), offset),
                *(BITS, TABLE, UNIT, SCALES, SHIFT, BLOCK_M, BLOCK_N, AT_ONCE, STAGES),
            )
        more = tl.load(bias + n, mask=n_in & (biased != 0), other=0.0)
        acc = tl.where(biased != 0, acc + more[None, :], acc)
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(out + at, acc, mask=m_in[:, None] & n_in[None, :])
