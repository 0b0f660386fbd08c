"""Products with weights as launches: floats as they are stored, int8 and int4 with quantized activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray
from quire.backends.cuda.kernels.variants import PRECISIONS, gated_tile, product_tile, quantized_tile
from quire.backends.cuda.launch_list import LaunchList, activation_name
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import DeviceWeight, spans_of
from quire.program import ops
from quire.program.numerics import GROUP, SPAN
from quire.program.program import Program, Value

_TYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}  # of float weights, as Triton calls them
_QUANTIZED = ("int8", "int4")
_ROUNDED_SPAN_BYTES = SPAN + SPAN // GROUP + 4  # of quantized activations: integers, block scales, a scale
_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


def linear(op: ops.Linear, to: LaunchList) -> None:
    """Record the product of a value and a weight."""
    weight, count, (outputs, inputs) = to.weights[op.weight.name], op.x.count, op.weight.shape
    out, bias, how = to.at(op.out), to.array(op.bias), {"BIAS": op.bias is not None, "RESIDUAL": False}
    if weight.format in _QUANTIZED:
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
                to.none,
                step.counts[count],
                outputs,
                spans_of(inputs),
                outputs,
            ),
            quantized_tile,
            INT4=weight.format == "int4",
            **how,
        )
    else:
        of, kind = to.at(op.x), _TYPES[weight.format]
        to.add_product(
            "product",
            count,
            outputs,
            lambda step: (
                out(step),
                of(step),
                *weight.arrays,
                bias,
                to.none,
                step.counts[count],
                outputs,
                inputs,
                inputs,
                outputs,
            ),
            lambda rows: product_tile(rows, kind),
            PRECISION=PRECISIONS[kind],
            **how,
        )


def gated_linear(op: ops.GatedLinear, to: LaunchList) -> None:
    """Record the product of a value and two weights of one format, of which one gates the other."""
    gate, up, count = to.weights[op.gate.name], to.weights[op.up.name], op.x.count
    out, (outputs, inputs), name = to.at(op.out), op.gate.shape, activation_name(op.activation)
    if gate.format in _QUANTIZED:
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
                outputs,
            ),
            quantized_tile,
            INT4=gate.format == "int4",
            ACTIVATION=name,
        )
    else:
        of, kind = to.at(op.x), _TYPES[gate.format]
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
                inputs,
                outputs,
            ),
            lambda rows: gated_tile(rows, kind),
            ACTIVATION=name,
            PRECISION=PRECISIONS[kind],
        )


def rounded_row_bytes(program: Program) -> int:
    """Return the bytes of quantized activations that a token may need at once."""
    widths = [spec.shape[-1] for op in program for spec in op.weights() if len(spec.shape) > 1]
    return max(map(spans_of, widths), default=0) * _ROUNDED_SPAN_BYTES


def _rounded(x: Value, weight: DeviceWeight, to: LaunchList) -> Callable[[StepArrays], tuple[Any, ...]]:
    """Record the quantization of a value for a weight, unless it is there already; return where it lies.

    This is (integers [rows, spans * 128], block scales [rows, spans * 4], scales [rows, spans]).
    """
    spans, count, block_scaled = spans_of(x.width), x.count, weight.format == "int8"

    def parts(step: StepArrays) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        rows = step.counts[count]
        first = rows * spans * 4
        scales = step.rounded.part(0, (rows, spans), _FLOAT32)
        integers = step.rounded.part(first, (rows, spans * SPAN), _INT8)
        blocks = step.rounded.part(first + integers.num_bytes, (rows, spans * SPAN // GROUP), _INT8)
        return integers, blocks, scales

    if to.rounded != (x.index, block_scaled):
        of = to.at(x)
        to.add(
            "quantize_rows",
            lambda step: (step.counts[count], spans, 1),
            lambda step: (*parts(step), of(step), x.width, x.width),
            BLOCK_SCALED=block_scaled,
        )
        to.rounded = (x.index, block_scaled)
    return parts
