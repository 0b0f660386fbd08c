"""Products of activations with float weights."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate
from quire.backends.cuda.kernels.tiles import read_ahead, row_tile


@triton.jit
def _operand(values, like, PRECISION: tl.constexpr):
    """Return values in the format in which they are multiplied: that of the weights, or float32."""
    if PRECISION == "stored":
        return values.to(like.dtype)
    else:
        return values.to(tl.float32)


@triton.jit
def _multiply(x, w, acc, PRECISION: tl.constexpr):
    """Return acc + x w^T of a tile of inputs."""
    x, w = _operand(x, w, PRECISION), _operand(w, w, PRECISION)
    if PRECISION == "stored":
        return tl.dot(x, tl.trans(w), acc)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _tile(array, first, begin, rows, inputs, TILED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK rows of [rows, inputs] from `first` on, BLOCK_K inputs of each; zeros beyond them."""
    if TILED:
        return array.load([first, begin])
    else:
        row, k = first + tl.arange(0, BLOCK), begin + tl.arange(0, BLOCK_K)
        at = array + row[:, None].to(tl.int64) * inputs + k[None, :]
        return tl.load(at, mask=(row < rows)[:, None] & (k < inputs)[None, :], other=0.0)


@triton.jit
def product(
    out,
    x,
    weight,
    bias,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILED: tl.constexpr = False,
    AHEAD: tl.constexpr = 0,
):
    """out [rows, outputs] = x weight^T (+ bias): x [rows, inputs], weight [outputs, inputs], bias [outputs].

    Grid of row_tile, 2 * rows * outputs * inputs operations. Weights are read once for each BLOCK_M rows: for
    one row their bytes are all that matters. PRECISION "stored" multiplies in the format of the weights
    (bf16: activations are rounded to it), "tf32" widens 16-bit weights exactly and rounds activations to
    tf32, "ieee" multiplies float32. If TILED, x and weight are tensor descriptors, whose tiles a unit of the
    GPU copies by itself.

    Each number of out is one float32 accumulator to which the inputs are added in order, BLOCK_K at a time:
    no split along the inputs, so that neither the tile's rows and outputs nor the number of programs can
    change a bit. BLOCK_K is the same for all tiles of a format.
    """
    m, n = row_tile() * BLOCK_M, tl.program_id(1) * BLOCK_N
    read_ahead(weight, n, outputs, inputs, BLOCK_N, AHEAD)
    if m < rows:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, inputs, BLOCK_K):
            a = _tile(x, m, begin, rows, inputs, TILED, BLOCK_M, BLOCK_K)
            w = _tile(weight, n, begin, outputs, inputs, TILED, BLOCK_N, BLOCK_K)
            acc = _multiply(a, w, acc, PRECISION)
        row, output = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        inside = output < outputs
        if BIAS:
            acc += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
        at = row[:, None].to(tl.int64) * outputs + output[None, :]
        tl.store(out + at, acc, mask=(row < rows)[:, None] & inside[None, :])


@triton.jit
def gated_product(
    out,
    x,
    gate,
    up,
    rows,
    outputs,
    inputs,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILED: tl.constexpr = False,
    AHEAD: tl.constexpr = 0,
):
    """out = activation(x gate^T) * (x up^T): gate and up [outputs, inputs]; otherwise as `product`.

    One pass over x. Both products have the sums of `product`, so fusing them does not change bits.
    """
    m, n = row_tile() * BLOCK_M, tl.program_id(1) * BLOCK_N
    read_ahead(gate, n, outputs, inputs, BLOCK_N, AHEAD)
    read_ahead(up, n, outputs, inputs, BLOCK_N, AHEAD)
    if m < rows:
        gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, inputs, BLOCK_K):
            a = _tile(x, m, begin, rows, inputs, TILED, BLOCK_M, BLOCK_K)
            w = _tile(gate, n, begin, outputs, inputs, TILED, BLOCK_N, BLOCK_K)
            gated = _multiply(a, w, gated, PRECISION)
            w = _tile(up, n, begin, outputs, inputs, TILED, BLOCK_N, BLOCK_K)
            acc = _multiply(a, w, acc, PRECISION)
        row, output = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        at = row[:, None].to(tl.int64) * outputs + output[None, :]
        inside = (row < rows)[:, None] & (output < outputs)[None, :]
        tl.store(out + at, activate(gated, ACTIVATION) * acc, mask=inside)


@triton.jit
def narrow_product(out, x, weight, bias, outputs, width, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, outputs] = x [rows, width] weight [outputs, width]^T + bias, for widths of a few numbers.

    Grid (rows, outputs / BLOCK). Sums in order; x is rounded to bfloat16 beside weights in it.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(width):
        own = tl.load(x + row * width + i)
        if weight.dtype.element_ty == tl.bfloat16:
            own = own.to(tl.bfloat16).to(tl.float32)
        total += own * tl.load(weight + column * width + i, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * outputs + column, total, mask=inside)


@triton.jit
def round_rows(out, x, inputs, BLOCK: tl.constexpr):
    """out [rows, inputs] = x, rounded to the format of out. Grid (rows, inputs / BLOCK)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * inputs + column, column < inputs
    tl.store(out + at, tl.load(x + at, mask=inside).to(out.dtype.element_ty), mask=inside)
