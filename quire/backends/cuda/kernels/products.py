"""Products of activations with float weights."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate


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
):
    """out [rows, outputs] = x weight^T (+ bias): x [rows, inputs], weight [outputs, inputs], bias [outputs].

    Grid (outputs / BLOCK_N, rows / BLOCK_M), 2 * rows * outputs * inputs operations. Weights are read once
    for each BLOCK_M rows: for one row their bytes are all that matters. PRECISION "stored" multiplies in the
    format of the weights (bf16: activations are rounded to it), "tf32" widens 16-bit weights exactly and
    rounds activations to tf32, "ieee" multiplies float32.

    Each number of out is one float32 accumulator to which the inputs are added in order, BLOCK_K at a time:
    no split along the inputs, so that neither the tile's rows and outputs nor the number of programs can
    change a bit. BLOCK_K is the same for all tiles of a format.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    m_in, n_in = m < rows, n < outputs
    x_at = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    w_at = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        k_in = begin + k < inputs
        a = tl.load(x_at + begin, mask=m_in[:, None] & k_in[None, :], other=0.0)
        w = tl.load(w_at + begin, mask=n_in[:, None] & k_in[None, :], other=0.0)
        acc = _multiply(a, w, acc, PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out + at, acc, mask=m_in[:, None] & n_in[None, :])


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
):
    """out = activation(x gate^T) * (x up^T): gate and up [outputs, inputs]; otherwise as `product`.

    One pass over x. Both products have the sums of `product`, so fusing them does not change bits.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    m_in, n_in = m < rows, n < outputs
    x_at = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    w_at = n[:, None].to(tl.int64) * inputs + k[None, :]
    gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        k_in = begin + k < inputs
        both = n_in[:, None] & k_in[None, :]
        a = tl.load(x_at + begin, mask=m_in[:, None] & k_in[None, :], other=0.0)
        gated = _multiply(a, tl.load(gate + w_at + begin, mask=both, other=0.0), gated, PRECISION)
        acc = _multiply(a, tl.load(up + w_at + begin, mask=both, other=0.0), acc, PRECISION)
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out + at, activate(gated, ACTIVATION) * acc, mask=m_in[:, None] & n_in[None, :])


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
