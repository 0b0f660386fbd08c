"""Products with weights as launches: floats as they are stored, int8 and int4 with quantized activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray
from quire.backends.cuda.launch_list import Grid, LaunchList, activation_name
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import DeviceWeight, spans_of
from quire.program import ops
from quire.program.numerics import GROUP, SPAN
from quire.program.program import Count, Program, Value

# One tile for any number of rows: in the interpreter a BLAS multiplies it, whose bits could depend on it.
_TILE = {"BLOCK_M": 16, "BLOCK_N": 64}
_INPUTS = 64  # multiplied at a time
_PRECISION = {"bf16": "stored", "f16": "tf32", "f32": "ieee"}  # by the format of the weights
_QUANTIZED = ("int8", "int4")
_ROUNDED_SPAN_BYTES = SPAN + SPAN // GROUP + 4  # of quantized activations: integers, block scales, a scale
_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


def linear(op: ops.Linear, to: LaunchList) -> None:
    """Record the product of a value and a weight."""
    weight, count, (outputs, inputs) = to.weights[op.weight.name], op.x.count, op.weight.shape
    out, bias, how = to.at(op.out), to.array(op.bias), {"BIAS": op.bias is not None, "RESIDUAL": False}
    if weight.format in _QUANTIZED:
        x = _rounded(op.x, weight, to)
        to.add(
            "quantized_product",
            _tiles(count, outputs),
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
            INT4=weight.format == "int4",
            **how,
            **_TILE,
        )
    else:
        of = to.at(op.x)
        to.add(
            "product",
            _tiles(count, outputs),
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
            PRECISION=_PRECISION[weight.format],
            **how,
            **_TILE,
            BLOCK_K=_INPUTS,
        )


def gated_linear(op: ops.GatedLinear, to: LaunchList) -> None:
    """Record the product of a value and two weights of one format, of which one gates the other."""
    gate, up, count = to.weights[op.gate.name], to.weights[op.up.name], op.x.count
    out, (outputs, inputs), name = to.at(op.out), op.gate.shape, activation_name(op.activation)
    if gate.format in _QUANTIZED:
        x = _rounded(op.x, gate, to)
        to.add(
            "quantized_gated_product",
            _tiles(count, outputs),
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
            INT4=gate.format == "int4",
            ACTIVATION=name,
            **_TILE,
        )
    else:
        of = to.at(op.x)
        to.add(
            "gated_product",
            _tiles(count, outputs),
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
            ACTIVATION=name,
            PRECISION=_PRECISION[gate.format],
            **_TILE,
            BLOCK_K=_INPUTS,
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


def _tiles(count: Count, outputs: int) -> Callable[[StepArrays], Grid]:
    """Return the grid of a product."""
    across = -(-outputs // _TILE["BLOCK_N"])
    return lambda step: (across, -(-step.counts[count] // _TILE["BLOCK_M"]), 1)
