"""Ops of single numbers. Each reads and writes its numbers once; there are no sums.

All have the grid (rows, width / BLOCK), rows of `width` numbers one after the other.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate, gated, softplus, tanh


@triton.jit
def _numbers(width, BLOCK: tl.constexpr):
    """Return the first number of this program's row, its columns, and which of them are inside."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64) * width, column, column < width


@triton.jit
def unary(out, x, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(x)."""
    row, column, inside = _numbers(width, BLOCK)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, activate(values, ACTIVATION), mask=inside)


@triton.jit
def add(out, x, y, width, BLOCK: tl.constexpr):
    """out = x + y."""
    row, column, inside = _numbers(width, BLOCK)
    first = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(y + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, first + second, mask=inside)


@triton.jit
def scale(out, x, width, factor, BLOCK: tl.constexpr):
    """out = x * factor."""
    row, column, inside = _numbers(width, BLOCK)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, values * factor, mask=inside)


@triton.jit
def scale_by_weight(out, x, weight, width, period, BLOCK: tl.constexpr):
    """out = x * weight, column c by number c % period of the weight."""
    row, column, inside = _numbers(width, BLOCK)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column % period, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, values * factor, mask=inside)


@triton.jit
def scale_by_position(out, x, positions, width, beta, period, first, BLOCK: tl.constexpr):
    """out[t] = x[t] * (1 + beta ln(1 + floor((position + first) / period))), the factor in float64 until
    then.

    beta is a pointer to a float64, as arguments are float32.
    """
    row, column, inside = _numbers(width, BLOCK)
    steps = (tl.load(positions + tl.program_id(0)) + first) // period
    factor = 1.0 + tl.load(beta) * tl.log(1.0 + (steps + tl.zeros((1,), tl.int32)).to(tl.float64))
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, values * factor.to(tl.float32), mask=inside)


@triton.jit
def soft_cap(out, x, width, cap, BLOCK: tl.constexpr):
    """out = cap * tanh(x / cap)."""
    row, column, inside = _numbers(width, BLOCK)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, cap * tanh(tl.div_rn(values, cap)), mask=inside)


@triton.jit
def take_columns(out, x, width, x_width, first, BLOCK: tl.constexpr):
    """out = x[:, first : first + width], rows of x x_width numbers long."""
    row, column, inside = _numbers(width, BLOCK)
    x_row = tl.program_id(0).to(tl.int64) * x_width + first
    tl.store(out + row + column, tl.load(x + x_row + column, mask=inside), mask=inside)


@triton.jit
def join_columns(out, x, y, width, x_width, BLOCK: tl.constexpr):
    """out = x and y side by side: rows of x_width and width - x_width numbers."""
    row, column, inside = _numbers(width, BLOCK)
    token, is_x = tl.program_id(0).to(tl.int64), column < x_width
    first = tl.load(x + token * x_width + column, mask=inside & is_x, other=0.0)
    second = tl.load(y + token * (width - x_width) + column - x_width, mask=inside & ~is_x, other=0.0)
    tl.store(out + row + column, tl.where(is_x, first, second), mask=inside)


@triton.jit
def gated_activation(out, gate, up, width, gate_width, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(gate) * up: gate_width is that of up, or 1 for one gate a row; limit as in `gated`."""
    row, column, inside = _numbers(width, BLOCK)
    gate_at = tl.program_id(0).to(tl.int64) * gate_width + column % gate_width
    gates = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(up + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, gated(gates, values, limit, ACTIVATION), mask=inside)


@triton.jit
def xielu(out, x, rise, fall, width, beta, BLOCK: tl.constexpr):
    """out = softplus(rise) x^2 + beta x above 0, (softplus(fall) + beta) (e^x - 1 - x) + beta x below.

    Near 0 the exponential is a series, as the difference would have few bits.
    """
    row, column, inside = _numbers(width, BLOCK)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    only = tl.zeros((1,), tl.int32)
    positive, negative = softplus(tl.load(rise + only)), softplus(tl.load(fall + only)) + beta
    near = 1.0 / 24.0 + values * (1.0 / 120.0 + values * (1.0 / 720.0))
    near = values * values * (0.5 + values * (1.0 / 6.0 + values * near))
    low = tl.where(values > -0.25, near, tl.exp(values) - 1.0 - values)
    curved = tl.where(values > 0, positive * values * values, negative * low)
    tl.store(out + row + column, curved + beta * values, mask=inside)
