"""Parts of values that the ranks of a group have, in memory for exchanges: [ranks, stride] numbers.

The rows of a part are one after the other. Grids are (rows, width / BLOCK, parts).
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def put_part(out, x, width, stride, rank, BLOCK: tl.constexpr):
    """Put x [rows, width] in the place of a rank in the parts `out`."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = tl.program_id(0).to(tl.int64) * width, column < width
    own = out + rank.to(tl.int64) * stride
    tl.store(own + row + column, tl.load(x + row + column, mask=inside), mask=inside)


@triton.jit
def join_parts(out, parts, width, stride, BLOCK: tl.constexpr):
    """out [rows, ranks * width] = the parts of all ranks side by side."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, rank, inside = tl.program_id(0).to(tl.int64), tl.program_id(2), column < width
    numbers = tl.load(parts + rank.to(tl.int64) * stride + row * width + column, mask=inside)
    at = (row * tl.num_programs(2) + rank) * width + column
    tl.store(out + at, numbers, mask=inside)
