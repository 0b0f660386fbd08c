"""Products with weights of other formats whose codes are floats (kernels.coded)."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.coded import float_rows
from quire.backends.cuda.kernels.tiles import row_tile


@triton.jit
def coded_float_product(
    out,
    x,
    low,
    high,
    scales,
    scale_codes,
    table,
    bias,
    rows,
    outputs,
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
    """out [rows, outputs] = x float32 [rows, inputs] times a weight whose codes are floats.

    `table` float32 [2^BITS] has the numbers of codes. Grid of row_tile.
    """
    first = row_tile() * BLOCK_M
    if first < rows:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        m_in, n_in = m < rows, n < outputs
        acc = float_rows(
            *(x, (low, high, scales, scale_codes), table, m, n, m_in, n_in, outputs, inputs),
            *((group, block, brain), BITS, TABLE, UNIT, SCALES, BLOCK_M, BLOCK_N, STAGES),
        )
        more = tl.load(bias + n, mask=n_in & (biased != 0), other=0.0)
        acc = tl.where(biased != 0, acc + more[None, :], acc)
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(out + at, acc, mask=m_in[:, None] & n_in[None, :])
