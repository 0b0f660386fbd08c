"""Rounding as the references do it."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def to_nearest(x):
    """Return x, within 2^22 of 0, rounded to an integer, ties to even: 1.5 * 2^23 leaves no bits below 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def is_finite(x):
    """Return whether each number is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def all_finite(x):
    """Return whether all numbers of a vector are finite."""
    return tl.min(is_finite(x).to(tl.int32), 0) > 0
