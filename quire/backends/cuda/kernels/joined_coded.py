"""The products of kernels.joined with weights of other formats, of one kind: those of kernels.coded."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.coded import float_rows, integer_rows, whole_rows
from quire.backends.cuda.kernels.joined import _own, _place
from quire.backends.cuda.kernels.tiles import row_tile


@triton.jit
def _store_biased(out, acc, bias, m, n, rows, outputs, biased):
    inside = n < outputs
    more = tl.load(bias + n, mask=inside & (biased != 0), other=0.0)
    acc = tl.where(biased != 0, acc + more[None, :], acc)
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out + at, acc, mask=(m < rows)[:, None] & inside[None, :])


@triton.jit
def joined_coded_product(
    out_0,
    out_1,
    out_2,
    q,
    sums,
    x_scales,
    low_0,
    high_0,
    scales_0,
    scale_codes_0,
    minimums_0,
    minimum_codes_0,
    bias_0,
    low_1,
    high_1,
    scales_1,
    scale_codes_1,
    minimums_1,
    minimum_codes_1,
    bias_1,
    low_2,
    high_2,
    scales_2,
    scale_codes_2,
    minimums_2,
    minimum_codes_2,
    bias_2,
    rows,
    outputs_0,
    outputs_1,
    outputs_2,
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
    """out_i [rows, outputs_i] = quantized x times weight_i transposed, as `coded_product`. The same grid."""
    which, outputs, first = _place(outputs_0, outputs_1, outputs_2, BLOCK_N)
    m, n = row_tile() * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    m_in, n_in, x = m < rows, n < outputs, (q, sums, x_scales)
    weight = (
        _own(which, low_0, low_1, low_2),
        _own(which, high_0, high_1, high_2),
        _own(which, scales_0, scales_1, scales_2),
        _own(which, scale_codes_0, scale_codes_1, scale_codes_2),
        _own(which, minimums_0, minimums_1, minimums_2),
        _own(which, minimum_codes_0, minimum_codes_1, minimum_codes_2),
    )
    if TABLE == "rows":
        acc = whole_rows(x, weight, m, n, m_in, n_in, spans, BLOCK_M, BLOCK_N)
    else:
        acc = integer_rows(
            *(x, weight, m, n, m_in, n_in, outputs, spans, (group, block, brain), offset),
            *(BITS, TABLE, UNIT, SCALES, SHIFT, BLOCK_M, BLOCK_N, AT_ONCE, STAGES),
        )
    out, bias = _own(which, out_0, out_1, out_2), _own(which, bias_0, bias_1, bias_2)
    _store_biased(out, acc, bias, m, n, rows, outputs, biased)


@triton.jit
def joined_coded_float_product(
    out_0,
    out_1,
    out_2,
    x,
    low_0,
    high_0,
    scales_0,
    scale_codes_0,
    table_0,
    bias_0,
    low_1,
    high_1,
    scales_1,
    scale_codes_1,
    table_1,
    bias_1,
    low_2,
    high_2,
    scales_2,
    scale_codes_2,
    table_2,
    bias_2,
    rows,
    outputs_0,
    outputs_1,
    outputs_2,
    inputs,
    group,
    block,
    brain,
    biased,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,
):
    """The same of x float32 [rows, inputs] and weights whose codes are floats, as `coded_float_product`."""
    which, outputs, first = _place(outputs_0, outputs_1, outputs_2, BLOCK_N)
    m, n = row_tile() * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    weight = (
        _own(which, low_0, low_1, low_2),
        _own(which, high_0, high_1, high_2),
        _own(which, scales_0, scales_1, scales_2),
        _own(which, scale_codes_0, scale_codes_1, scale_codes_2),
    )
    table = _own(which, table_0, table_1, table_2)
    acc = float_rows(
        *(x, weight, table, m, n, m < rows, n < outputs, outputs, inputs),
        *((group, block, brain), BITS, TABLE, UNIT, SCALES, BLOCK_M, BLOCK_N, STAGES),
    )
    out, bias = _own(which, out_0, out_1, out_2), _own(which, bias_0, bias_1, bias_2)
    _store_biased(out, acc, bias, m, n, rows, outputs, biased)
