"""Products with weights as launches: floats as they are stored, int8 and int4 with quantized activations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray
from quire.backends.cuda.kernels.variants import (
    INTEGERS,
    PRECISIONS,
    gated_tile,
    product_tile,
    quantized_tile,
)
from quire.backends.cuda.launch_list import At, LaunchList, activation_name
from quire.backends.cuda.scratch import Part, carve
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import DeviceWeight, spans_of
from quire.program import ops
from quire.program.numerics import GROUP, SPAN
from quire.program.program import Value

FLOAT_TYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}  # of float weights, as Triton calls them
QUANTIZED = tuple(INTEGERS)
_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


def linear(op: ops.Linear, to: LaunchList) -> None:
    """Record the product of a value and a weight."""
    weight, count, (outputs, inputs) = to.weights[op.weight.name], op.x.count, op.weight.shape
    out, bias, how = to.at(op.out), to.array(op.bias), {"BIAS": op.bias is not None}
    if weight.format in QUANTIZED:
        x = _rounded(op.x, weight, to)
        to.add_product(
            "quantized_product",
            count,
            outputs,
            lambda step: (
                out(step),
                *x(step),
                *weight.arrays,
                bias,
                step.counts[count],
                outputs,
                spans_of(inputs),
            ),
            quantized_tile,
            KIND=weight.format,
            **how,
        )
    else:
        of, kind = to.at(op.x), FLOAT_TYPES[weight.format]
        to.add_product(
            "product",
            count,
            outputs,
            lambda step: (
                out(step),
                of(step),
                *weight.arrays,
                bias,
                step.counts[count],
                outputs,
                inputs,
            ),
            lambda rows: product_tile(rows, kind),
            PRECISION=PRECISIONS[kind],
            **how,
        )


def gated_linear(op: ops.GatedLinear, to: LaunchList) -> None:
    """Record the product of a value and two weights of one format, of which one gates the other."""
    gate, up, count = to.weights[op.gate.name], to.weights[op.up.name], op.x.count
    out, (outputs, inputs), name = to.at(op.out), op.gate.shape, activation_name(op.activation)
    if gate.format in QUANTIZED:
        x = _rounded(op.x, gate, to)
        to.add_product(
            "quantized_gated_product",
            count,
            outputs,
            lambda step: (
                out(step),
                *x(step),
                *gate.arrays,
                *up.arrays,
                step.counts[count],
                outputs,
                spans_of(inputs),
            ),
            quantized_tile,
            KIND=gate.format,
            ACTIVATION=name,
        )
    else:
        of, kind = to.at(op.x), FLOAT_TYPES[gate.format]
        to.add_product(
            "gated_product",
            count,
            outputs,
            lambda step: (
                out(step),
                of(step),
                *gate.arrays,
                *up.arrays,
                step.counts[count],
                outputs,
                inputs,
            ),
            lambda rows: gated_tile(rows, kind),
            ACTIVATION=name,
            PRECISION=PRECISIONS[kind],
        )


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
    return (spans * SPAN, _INT8), (spans * SPAN // GROUP, _INT8), (spans, _FLOAT32)


def _rounded(
    x: Value, weight: DeviceWeight, to: LaunchList
) -> Callable[[StepArrays], tuple[DeviceArray, ...]]:
    """Record the quantization of a value for a weight, unless it is there already; return where it lies."""
    count, block_scaled = x.count, weight.format == "int8"
    if to.rounded is None or to.rounded[:2] != (x.index, block_scaled):
        parts = quantized_rows(to, to.at(x), lambda step: step.counts[count], x.width, block_scaled)
        to.rounded = (x.index, block_scaled, parts)
    return to.rounded[2]
