"""Products with Int8 and Int4 weights: activations rounded by rows, integer products, bit for bit.

As quire.program.numerics defines them: a group is 32 inputs of an output with an 8-bit block scale, a span
128 inputs of a row of activations with a float32 scale. Sums within a span are exact integers below 2^31;
spans are added in order, each with one rounding (fma). So every result equals the NumPy reference bit for
bit, whatever the tile. Inputs are padded to whole spans (quire.backends.cuda.packing).
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate
from quire.backends.cuda.kernels.rounding import is_finite, to_nearest
from quire.backends.cuda.kernels.tiles import bits_of, read_ahead, row_tile

GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(4)  # of a span
SPAN = tl.constexpr(128)


@triton.jit
def quantize_rows(q, block_scales, scales, x, width, BLOCK_SCALED: tl.constexpr):
    """Quantize x [rows, width] as numerics.quantize_rows.

    q int8 [rows, spans * 128], block_scales int32 [rows, spans * 4] if BLOCK_SCALED (127 steps of 127, for
    Int8 weights), scales float32 [rows, spans]. Grid (rows, spans). Reads x once, writes a quarter of its
    bytes; 8 operations a number. No sums; maxima have no order.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    spans = tl.num_programs(1)
    group = tl.arange(0, GROUPS)
    column = span * SPAN + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    finite = tl.min(is_finite(values).to(tl.int32), 1)
    tops = tl.max(tl.where(is_finite(values), tl.abs(values), 0.0), 1)
    amax, all_finite = tl.max(tops, 0), tl.min(finite, 0) > 0
    steps = 16129.0 if BLOCK_SCALED else 127.0
    inverse = tl.div_rn(steps, amax)
    inverse = tl.where(is_finite(inverse) & all_finite, inverse, 0.0)
    if BLOCK_SCALED:
        shares = tl.minimum(tl.ceil(tops * tl.div_rn(inverse, 127.0)), 127.0)
        own = tl.where(shares > 0, tl.div_rn(inverse, tl.where(shares > 0, shares, 1.0)), 0.0)
        tl.store(block_scales + (row * spans + span) * GROUPS + group, shares.to(tl.int32))
    else:
        own = inverse + tl.zeros((GROUPS,), tl.float32)
    rounded = tl.where(own[:, None] > 0, to_nearest(values * own[:, None]), 0.0)
    tl.store(q + row * spans * SPAN + column, rounded.to(tl.int8))
    tl.store(scales + row * spans + span, tl.where(all_finite, tl.div_rn(amax, steps), float("nan")))


@triton.jit
def _add_group(total, x, w, row_scales, block_scales, BLOCK_SCALED: tl.constexpr):
    """Return the integer sum of a span after a group: its dot product times the block scales."""
    dots = tl.dot(x, tl.trans(w), out_dtype=tl.int32)
    if BLOCK_SCALED:
        dots = ((dots + 8) >> 4) * row_scales[:, None]
    return total + dots * block_scales[None, :]


@triton.jit
def _int8_rows(
    x,
    x_blocks,
    x_scales,
    weight,
    block_scales,
    m,
    n,
    m_in,
    n_in,
    outputs,
    spans,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return rows m of the product with outputs n of an Int8 weight, before the scales of channels."""
    k = tl.arange(0, GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    x_row, w_row = m[:, None].to(tl.int64) * (spans * SPAN), n[:, None].to(tl.int64) * (spans * SPAN)
    for span in tl.range(0, spans, num_stages=STAGES):
        total = tl.zeros((BM, BN), tl.int32)
        for part in tl.static_range(GROUPS):
            group = span * GROUPS + part
            at = group * GROUP + k[None, :]
            a = tl.load(x + x_row + at, mask=m_in[:, None], other=0)
            w = tl.load(weight + w_row + at, mask=n_in[:, None], other=0)
            own = tl.load(x_blocks + m * (spans * GROUPS) + group, mask=m_in, other=0)
            scale = bits_of(block_scales, group, n, n_in, outputs, 1)
            total = _add_group(total, a, w, own, scale, True)
        scale = tl.load(x_scales + m * spans + span, mask=m_in, other=0.0) * 16.0
        acc = tl.fma(total.to(tl.float32), tl.broadcast_to(scale[:, None], (BM, BN)), acc)
    return acc


@triton.jit
def _int4_rows(
    x,
    x_scales,
    packed,
    block_scales,
    m,
    n,
    m_in,
    n_in,
    outputs,
    spans,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the same of an Int4 weight packed by pairs of groups: the low halves of 32 bytes are one
    group.
    """
    k = tl.arange(0, GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    x_row, w_row = m[:, None].to(tl.int64) * (spans * SPAN), n[:, None].to(tl.int64) * (spans * SPAN // 2)
    for span in tl.range(0, spans, num_stages=STAGES):
        total = tl.zeros((BM, BN), tl.int32)
        for pair in tl.static_range(GROUPS // 2):
            group = span * GROUPS + 2 * pair
            byte = tl.load(packed + w_row + group * (GROUP // 2) + k[None, :], mask=n_in[:, None], other=0)
            for half in tl.static_range(2):
                at = (group + half) * GROUP + k[None, :]
                a = tl.load(x + x_row + at, mask=m_in[:, None], other=0)
                w = ((byte >> (4 * half)) & 15).to(tl.int8) - 8
                scale = bits_of(block_scales, group + half, n, n_in, outputs, 1)
                total = _add_group(total, a, w, scale, scale, False)
        scale = tl.load(x_scales + m * spans + span, mask=m_in, other=0.0)
        acc = tl.fma(total.to(tl.float32), tl.broadcast_to(scale[:, None], (BM, BN)), acc)
    return acc


@triton.jit
def _rows_of(
    x,
    x_blocks,
    x_scales,
    weight,
    block_scales,
    channels,
    m,
    n,
    m_in,
    n_in,
    outputs,
    spans,
    KIND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return rows m of the product with outputs n of a weight of a kind: "int8" or "int4"."""
    where = (m, n, m_in, n_in, outputs, spans)
    if KIND == "int4":
        acc = _int4_rows(x, x_scales, weight, block_scales, *where, BM, BN, STAGES)
    else:
        acc = _int8_rows(x, x_blocks, x_scales, weight, block_scales, *where, BM, BN, STAGES)
    return acc * tl.load(channels + n, mask=n_in, other=0.0)[None, :]


@triton.jit
def row_length(spans, KIND: tl.constexpr):
    """Return the bytes of a row of weights of a kind."""
    if KIND == "int4":
        return spans * (SPAN // 2)
    else:
        return spans * SPAN


@triton.jit
def quantized_product(
    out,
    x,
    x_blocks,
    x_scales,
    weight,
    block_scales,
    channels,
    bias,
    rows,
    outputs,
    spans,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
    AHEAD: tl.constexpr = 0,
):
    """out [rows, outputs] = quantized x times a weight transposed (+ bias).

    x, x_blocks and x_scales are those of quantize_rows. weight int8 [outputs, spans * 128], or of 4 bits
    uint8 [outputs, spans * 64]; block_scales int8 [spans * 4, padded(outputs)]; channels float32 [outputs]
    (packing.packed). Grid of row_tile. 2 * rows * outputs * inputs integer operations on tensor cores and 4
    for each dot of a group; reads the weight once for BLOCK_M rows, STAGES - 1 spans ahead.
    """
    first, output = row_tile() * BLOCK_M, tl.program_id(1) * BLOCK_N
    read_ahead(weight, output, outputs, row_length(spans, KIND), BLOCK_N, AHEAD)
    if first < rows:
        n = output + tl.arange(0, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        m_in, n_in = m < rows, n < outputs
        acc = _rows_of(
            *(x, x_blocks, x_scales, weight, block_scales, channels, m, n, m_in, n_in, outputs, spans),
            *(KIND, BLOCK_M, BLOCK_N, STAGES),
        )
        if BIAS:
            acc += tl.load(bias + n, mask=n_in, other=0.0)[None, :]
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(out + at, acc, mask=m_in[:, None] & n_in[None, :])


@triton.jit
def quantized_gated_product(
    out,
    x,
    x_blocks,
    x_scales,
    gate,
    gate_scales,
    gate_channels,
    up,
    up_scales,
    up_channels,
    rows,
    outputs,
    spans,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
    AHEAD: tl.constexpr = 0,
):
    """out = activation(x gate^T) * (x up^T) of quantized x and two weights of one kind; else as above.

    The activation has float32 operations, so only the products have the bits of the reference.
    """
    first, output = row_tile() * BLOCK_M, tl.program_id(1) * BLOCK_N
    read_ahead(gate, output, outputs, row_length(spans, KIND), BLOCK_N, AHEAD)
    read_ahead(up, output, outputs, row_length(spans, KIND), BLOCK_N, AHEAD)
    if first < rows:
        n = output + tl.arange(0, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        m_in, n_in = m < rows, n < outputs
        where, x_arrays = (m, n, m_in, n_in, outputs, spans), (x, x_blocks, x_scales)
        how: tl.constexpr = (KIND, BLOCK_M, BLOCK_N, STAGES)
        gated = _rows_of(*x_arrays, gate, gate_scales, gate_channels, *where, *how)
        acc = _rows_of(*x_arrays, up, up_scales, up_channels, *where, *how)
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(out + at, activate(gated, ACTIVATION) * acc, mask=m_in[:, None] & n_in[None, :])
