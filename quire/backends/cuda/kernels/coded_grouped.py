"""Products of experts whose weights are codes of other formats: those of kernels.coded for rows by expert.

Arguments and grid are those of kernels.grouped; arrays of weights have those of all experts.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.coded import float_rows, integer_rows, whole_rows
from quire.backends.cuda.kernels.coded_parts import plane_bytes
from quire.backends.cuda.kernels.grouped import _rows
from quire.backends.cuda.kernels.tiles import padded


@triton.jit
def _of_expert(
    weight, expert, outputs, spans, how, BITS: tl.constexpr, SCALES: tl.constexpr, SHIFT: tl.constexpr
):
    """Return the arrays of an expert's weight."""
    LOW: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    low, high, scales, scale_codes, minimums, minimum_codes = weight
    own, group, block = expert.to(tl.int64) * outputs, how[0], how[1]
    rows = expert.to(tl.int64) * padded(outputs)
    groups = rows * tl.cdiv(spans * 128, group)
    values = groups if SCALES == "16" or SCALES == "32" else rows * tl.cdiv(spans * 128, block)
    return (
        low + own * plane_bytes(spans, LOW),
        high + own * plane_bytes(spans, BITS - LOW),
        scales + values,
        scale_codes + groups,
        minimums + (groups if SHIFT == "zeros" else values),
        minimum_codes + groups,
    )


@triton.jit
def grouped_coded_product(
    out,
    q,
    sums,
    x_scales,
    order,
    offsets,
    low,
    high,
    scales,
    scale_codes,
    minimums,
    minimum_codes,
    bias,
    outputs,
    spans,
    experts,
    chosen,
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
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr = 4,
    STAGES: tl.constexpr = 1,
):
    """out = quantized x times weight[expert]^T, plus bias [experts, outputs] if `biased`, bit for bit."""
    expert, pair, inside = _rows(order, offsets, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in, m, how = n < outputs, pair // chosen, (group, block, brain)
        weight = (low, high, scales, scale_codes, minimums, minimum_codes)
        weight = _of_expert(weight, expert, outputs, spans, how, BITS, SCALES, SHIFT)
        x = (q, sums, x_scales)
        if TABLE == "rows":
            acc = whole_rows(x, weight, m, n, inside, n_in, spans, BLOCK_M, BLOCK_N)
        else:
            acc = integer_rows(
                *(x, weight, m, n, inside, n_in, outputs, spans, how, offset),
                *(BITS, TABLE, UNIT, SCALES, SHIFT, BLOCK_M, BLOCK_N, AT_ONCE, STAGES),
            )
        more = tl.load(bias + expert.to(tl.int64) * outputs + n, mask=n_in & (biased != 0), other=0.0).to(
            tl.float32
        )
        at = out + pair[:, None].to(tl.int64) * outputs + n[None, :]
        acc = tl.where(biased != 0, acc + more[None, :], acc)
        tl.store(at, acc, mask=inside[:, None] & n_in[None, :])


@triton.jit
def grouped_coded_float_product(
    out,
    x,
    order,
    offsets,
    low,
    high,
    scales,
    scale_codes,
    table,
    bias,
    outputs,
    inputs,
    experts,
    chosen,
    group,
    block,
    brain,
    biased,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
):
    """The same of x float32 and weights whose codes are floats."""
    expert, pair, inside = _rows(order, offsets, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in, m, how = n < outputs, pair // chosen, (group, block, brain)
        weight = (low, high, scales, scale_codes, low, low)
        weight = _of_expert(weight, expert, outputs, tl.cdiv(inputs, 128), how, BITS, SCALES, "")
        acc = float_rows(
            *(x, weight, table, m, n, inside, n_in, outputs, inputs, how),
            *(BITS, TABLE, UNIT, SCALES, BLOCK_M, BLOCK_N, STAGES),
        )
        more = tl.load(bias + expert.to(tl.int64) * outputs + n, mask=n_in & (biased != 0), other=0.0).to(
            tl.float32
        )
        at = out + pair[:, None].to(tl.int64) * outputs + n[None, :]
        acc = tl.where(biased != 0, acc + more[None, :], acc)
        tl.store(at, acc, mask=inside[:, None] & n_in[None, :])
