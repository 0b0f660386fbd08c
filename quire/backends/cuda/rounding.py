"""Rounding of activations for weights: what is kept of a row, and the launches for integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, Launch
from quire.backends.cuda.coded_form import CodedForm
from quire.backends.cuda.coded_launches import coded_row
from quire.backends.cuda.kernels.product_variants import INTEGERS
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.scratch import Part, carve
from quire.backends.cuda.segments import NOTHING
from quire.backends.cuda.weights import spans_of
from quire.program.numerics import GROUP, SPAN
from quire.quantize.kinds import DTYPES

if TYPE_CHECKING:
    from quire.backends.cuda.launch_list import Arrays, At, LaunchList
    from quire.backends.cuda.step_arrays import StepArrays

FLOAT_TYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}  # of float weights, as Triton calls them
QUANTIZED = tuple(INTEGERS)
_BFLOAT16 = DTYPES["bf16"]
_INT8, _INT32, _FLOAT32 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.float32)


def rounded_row(format: str, width: int) -> tuple[Part, ...]:
    """Return what is kept of a row of activations for a weight in a format: nothing for other floats."""
    if format == "bf16":
        return ((width, _BFLOAT16),)
    if (form := CodedForm.of_format(format)) is not None:
        return coded_row(form, width)
    return quantized_row(width) if format in QUANTIZED else ()


def unrounded(x: At) -> Arrays:
    """Return where rows are for a kernel that takes them as they are."""
    return lambda step: (x(step),)


def rounded_floats(
    to: LaunchList,
    x: At,
    count: Callable[[StepArrays], int],
    width: int,
    is_large: Callable[[StepArrays], bool],
) -> Arrays:
    """Record the rounding of rows to bfloat16, to the start of scratch memory, in steps with large products.

    Return where rows are then: small products round what they read themselves.
    """
    block = row_block(width)

    def rows(step: StepArrays) -> tuple[DeviceArray, ...]:
        return carve(step.scratch, count(step), rounded_row("bf16", width)) if is_large(step) else (x(step),)

    def launch(step: StepArrays) -> Launch:
        if not is_large(step):
            return NOTHING
        grid = (count(step), -(-width // block), 1)
        return Launch("round_rows", grid, (*rows(step), x(step), width), {"BLOCK": block})

    to.launches.append(launch)
    return rows


def quantized_rows(
    to: LaunchList, x: At, count: Callable[[StepArrays], int], width: int, block_scaled: bool
) -> Callable[[StepArrays], tuple[DeviceArray, ...]]:
    """Record the quantization of rows of `width` numbers, to the start of scratch memory; return where.

    This is (integers [rows, spans * 128], block scales [rows, spans * 4], scales [rows, spans]).
    """
    spans = spans_of(width)

    def parts(step: StepArrays) -> tuple[DeviceArray, ...]:
        return carve(step.scratch, count(step), quantized_row(width))

    to.add(
        "quantize_rows",
        lambda step: (count(step), spans, 1),
        lambda step: (*parts(step), x(step), width),
        BLOCK_SCALED=block_scaled,
    )
    return parts


def quantized_row(width: int) -> tuple[Part, ...]:
    """Return what is kept of a row of quantized activations: integers, block scales, scales of spans."""
    spans = spans_of(width)
    return (spans * SPAN, _INT8), (spans * SPAN // GROUP, _INT32), (spans, _FLOAT32)
