"""The product of activations with integers in groups that have float scales and minimums (Coded)."""

from __future__ import annotations

from math import gcd

import numpy as np

from quire.program.numerics import GROUP, SPAN, fma, quantize_rows
from quire.quantize.kinds import Floats

_FEW_BITS = 6  # codes of more bits are worth activations with a scale for every 32 inputs
_LEAST_PART = 4


def span_of(bits: int) -> int:
    """Return how many inputs of an activation share a scale, for weights of so many bits."""
    return SPAN if bits <= _FEW_BITS else GROUP


def summed_together(group: int) -> int:
    """Return how many inputs of a group are one sum: all, or of odd sizes a part that divides 128."""
    part = gcd(group, SPAN)
    return part if part >= _LEAST_PART else group


def coded_matmul(
    x: Floats, numbers: Floats, scales: Floats, minimums: Floats | None, group: int | None, bits: int
) -> Floats:
    """Return x [T, in] times (scales * numbers + minimums) [out, in] transposed, [T, out].

    numbers are integers [out, in]; scales and minimums [out, groups of `group` inputs, or one of all]. x is
    rounded to scale * q by spans of `span_of(bits)` inputs (quantize_rows without block scales). A unit is as
    many inputs as are in one span and in one part of a group (summed_together). For each span in order t
    begins as 0, and for each of its units in order

        t = fma(float32(sum of number * q), scale of the group, t)
        t = fma(float32(sum of q), minimum of the group, t)        if there are minimums

    with sums that are exact integers below 2^31; then acc = fma(t, scale of the span, acc), rounded once.
    """
    width, span = x.shape[1], span_of(bits)
    most = width if group is None else summed_together(group)
    q, _, x_scales = quantize_rows(x, block_scaled=False, span=span)
    wide, total = q.astype(np.float64), np.zeros((len(x), len(numbers)), np.float32)
    for first in range(0, width, span):
        last, part = min(first + span, width), np.zeros_like(total)
        begin = first
        while begin < last:
            end, at = min(last, (begin // most + 1) * most), begin // (group or width)
            rows = wide[:, begin:end]
            dots = (rows @ numbers[:, begin:end].T.astype(np.float64)).astype(np.float32)
            part = fma(dots, scales[:, at], part)
            if minimums is not None:
                part = fma(rows.sum(-1, keepdims=True).astype(np.float32), minimums[:, at], part)
            begin = end
        total = fma(part, x_scales[:, first // span, None], total)
    return total


def row_matmul(x: Floats, numbers: Floats, scales: Floats) -> Floats:
    """Return x [T, in] times (scales * numbers) [out, in] transposed, [T, out], as W8A8 checkpoints do.

    numbers are integers [out, in], scales [out]. x is rounded to scale * q with one scale for a row
    (quantize_rows). The result is float32(sum of number * q) * scale of the row * scale of the output, in
    this order, where the sum over the whole row is an exact integer.
    """
    width = x.shape[1]
    q, _, x_scales = quantize_rows(x, block_scaled=False, span=-(-width // GROUP) * GROUP)
    exact = np.zeros((len(x), len(numbers)))  # integers below 2^53: any order is exact
    for first in range(0, width, SPAN):
        cut = slice(first, first + SPAN)
        exact += q[:, cut].astype(np.float64) @ numbers[:, cut].T.astype(np.float64)
    return exact.astype(np.float32) * x_scales * scales
