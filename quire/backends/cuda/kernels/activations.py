"""The activation functions of quire.program.numerics, elementwise in float32."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Return tanh by the exponential of -2|x|, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    magnitude = tl.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def softplus(x):
    """Return ln(1 + e^x): the logarithm of a sum near 1 is corrected for what the sum was rounded by."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    exact = tl.where(
        above == 1.0, small, tl.log(above) * tl.div_rn(small, tl.where(above == 1.0, 1.0, above - 1.0))
    )
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + exact


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Return the activation of that name."""
    if NAME == "silu":
        return x * sigmoid(x)
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + tanh(inner))
    elif NAME == "gelu":
        return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))
    elif NAME == "sigmoid":
        return sigmoid(x)
    elif NAME == "tanh":
        return tanh(x)
    elif NAME == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "relu2":
        kept = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return kept * kept
    else:
        tl.static_assert(NAME == "linear")
        return x


@triton.jit
def gated(gate, up, limit, NAME: tl.constexpr):
    """Return the activation of gate times up; "limited" is that of gpt-oss (ops.Experts.limit)."""
    if NAME == "limited":
        all: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, limit, propagate_nan=all)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=all), limit, propagate_nan=all)
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return activate(gate, NAME) * up
