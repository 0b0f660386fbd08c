"""Products with weights as launches: floats as they are stored, integers with quantized activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray, Launch
from quire.backends.cuda.adapters import KINDS
from quire.backends.cuda.coded_form import CodedForm
from quire.backends.cuda.coded_launches import (
    CodedArguments,
    coded_tiles,
    rounded_rows,
)
from quire.backends.cuda.joined import Product, add_product
from quire.backends.cuda.kernels.product_variants import (
    JOINED_ROWS,
    PRECISIONS,
    gated_tile,
    product_tile,
    quantized_tile,
)
from quire.backends.cuda.kernels.variant import LARGE, MOST_SMALL, row_block, size_of
from quire.backends.cuda.kernels.variants import ADAPTER_RANKS, ADAPTER_SEGMENT, ADAPTER_TILE, MULTIPLE
from quire.backends.cuda.launch_list import Arrays, At, LaunchList, activation_name, product_grid
from quire.backends.cuda.rounding import (
    FLOAT_TYPES,
    QUANTIZED,
    quantized_rows,
    rounded_floats,
    rounded_row,
    unrounded,
)
from quire.backends.cuda.scratch import Part, carve, row_bytes
from quire.backends.cuda.segments import NOTHING
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import DeviceWeight, spans_of
from quire.program import ops
from quire.program.program import Op, Value, WeightSpec
from quire.quantize.kinds import DTYPES

NARROW = 16  # inputs: matrices with fewer have a kernel of their own
_INT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


def linear(op: ops.Linear, to: LaunchList) -> None:
    """Record the product of a value and a weight."""
    _product(op.x, op.weight, op.bias, to.at(op.out), to)
    if op.adapted:
        _adapted(op, to)


def _product(x: Value, spec: WeightSpec, bias: WeightSpec | None, out: At, to: LaunchList) -> None:
    """Record the product of a value and a weight, written to `out`."""
    weight, count, (outputs, inputs) = to.weights[spec.name], x.count, spec.shape
    own_bias, how = to.array(bias), {"BIAS": bias is not None}
    if weight.form is None and weight.format not in QUANTIZED and is_narrow(spec):
        of, block = to.at(x), row_block(0)
        to.add(
            "narrow_product",
            lambda step: (step.counts[count], -(-outputs // block), 1),
            lambda step: (out(step), of(step), *weight.arrays, own_bias, outputs, inputs),
            **how,
            BLOCK=block,
        )
        return
    tile: Callable[[int, int], Mapping[str, Constant]]
    arrays, constants, joined_rows = weight.arrays, dict[str, Constant](how), JOINED_ROWS
    if (form := weight.form) is not None:
        coded = CodedArguments.of(weight, form, to.none)
        arrays, tile, constants, joined_rows = coded.arrays, _by_rows(coded_tiles(form)), {}, MOST_SMALL
        rest = (*coded.numbers, int(bias is not None))
        if form.kind.is_float:
            kernel, rows, sizes = "coded_float_product", unrounded(to.at(x)), (inputs, *rest)
        else:
            kernel, rows, sizes = "coded_product", _coded_rows(x, coded, to), (spans_of(inputs), *rest)
    elif weight.format in QUANTIZED:
        kernel, rows, sizes = "quantized_product", _rounded(x, weight, to), (spans_of(inputs),)
        tile, constants["KIND"] = quantized_tile, weight.format
    else:
        kernel, rows, sizes = "product", _float_rows(x, weight.format, to), (inputs,)
        kind = FLOAT_TYPES[weight.format]
        tile, constants["PRECISION"] = partial(product_tile, weight=kind), PRECISIONS[kind]
        joined_rows = JOINED_ROWS if kind == "bf16" else 0
    product = Product(x, kernel, rows, sizes, tile, constants, out, (*arrays, own_bias), outputs)
    add_product(product, joined_rows, to)


def _by_rows(tile: Callable[[int], Mapping[str, Constant]]) -> Callable[[int, int], Mapping[str, Constant]]:
    """Return a choice of tiles that does not depend on the number of outputs."""
    return lambda rows, outputs: tile(rows)


def is_narrow(spec: WeightSpec) -> bool:
    """Return whether a matrix of floats has the kernel for rows of any size, which is slow for large ones.

    It is that of matrices with few inputs, and of those that towers multiply once for an image.
    """
    inputs = spec.shape[-1]
    return inputs < NARROW or (inputs % MULTIPLE > 0 and not spec.quantizable)


def float_product(out: DeviceArray, x: DeviceArray, weight: DeviceArray, none: DeviceArray) -> Launch:
    """Return the product of x [rows, inputs] and floats, weight [outputs, inputs], without a bias.

    Many rows for a bfloat16 weight are in bfloat16, all others in float32. `none` stands for the bias.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    kind = next(FLOAT_TYPES[name] for name, dtype in DTYPES.items() if dtype == weight.dtype)
    tile = product_tile(rows, outputs, kind)
    grid = product_grid(-(-rows // tile["BLOCK_M"]), outputs, tile)
    how = {"PRECISION": PRECISIONS[kind], "BIAS": False, **tile}
    return Launch("product", grid, (out, x, weight, none, rows, outputs, inputs), how)


def _adapted(op: ops.Linear, to: LaunchList) -> None:
    """Record what the adapters of rows add to a product, in steps with rows that have any."""
    out, x, count, (outputs, inputs) = to.at(op.out), to.at(op.x), op.out.count, op.weight.shape
    segments, name = -(-inputs // ADAPTER_SEGMENT), op.weight.name
    parts = adapted_parts(op, to.weights[name].format)

    def launch(step: StepArrays, kind: str, up: bool) -> Launch:
        if kind not in step.adapters.kinds:
            return NOTHING
        rows, one_each = step.counts[count], step.num_rows == step.counts[count]
        tokens = 1 if one_each else ADAPTER_TILE["BLOCK_M"]
        sums, places = carve(step.scratch, rows, parts)[1], step.adapters.places[count]
        (table, scales), tiles = to.adapters.table(kind, name), -(-rows // tokens)
        how: Mapping[str, Constant] = {"PRECISION": PRECISIONS[kind], "BLOCK_M": ADAPTER_TILE["BLOCK_M"]}
        if up:
            width = ADAPTER_TILE["BLOCK_N"]
            args: tuple[Argument, ...] = (out(step), sums, places, table, scales)
            args = (*args, rows, tokens, segments, outputs)
            return Launch("adapter_up", (-(-outputs // width), tiles, 1), args, {**how, "BLOCK_N": width})
        args = (sums, x(step), places, table, rows, tokens, inputs)
        return Launch("adapter_down", (segments, tiles, 1), args, {**how, "BLOCK_K": ADAPTER_TILE["BLOCK_K"]})

    to.launches += [partial(launch, kind=kind, up=up) for kind in KINDS for up in (False, True)]


def adapted_parts(op: ops.Linear, format: str) -> tuple[Part, ...]:
    """Return what is kept of each row of an adapted product: rounded activations, and sums of segments."""
    inputs = op.weight.shape[1]
    sums = -(-inputs // ADAPTER_SEGMENT) * ADAPTER_RANKS
    return ((_rounded_bytes(format, inputs), _INT8), (sums, _FLOAT32))


def gated_linear(op: ops.GatedLinear, to: LaunchList) -> None:
    """Record the product of a value and two weights, of which one gates the other."""
    if not are_fused(to.weights[op.gate.name].format, to.weights[op.up.name].format):
        _gated_apart(op, to)
        return
    gate, up = to.weights[op.gate.name], to.weights[op.up.name]
    outputs, inputs = op.gate.shape
    tile: Callable[[int, int], Mapping[str, Constant]]
    constants: dict[str, Constant] = {"ACTIVATION": activation_name(op.activation)}
    if gate.format in QUANTIZED:
        kernel, rows, size = "quantized_gated_product", _rounded(op.x, gate, to), spans_of(inputs)
        tile, constants["KIND"] = _gated_quantized_tile, gate.format
    else:
        kernel, rows, size = "gated_product", _float_rows(op.x, gate.format, to), inputs
        kind = FLOAT_TYPES[gate.format]
        tile, constants["PRECISION"] = partial(gated_tile, weight=kind), PRECISIONS[kind]
    arrays, out = (*gate.arrays, *up.arrays), to.at(op.out)
    add_product(Product(op.x, kernel, rows, (size,), tile, constants, out, arrays, outputs), 0, to)


def _gated_quantized_tile(rows: int, outputs: int) -> Mapping[str, Constant]:
    """Return the tile of a product with integers of a gate and of what it gates."""
    return quantized_tile(rows, 2 * outputs)


def are_fused(gate: str, up: str) -> bool:
    """Return whether there is a kernel for the product with gates and others in these formats."""
    return gate == up and CodedForm.of_format(gate) is None


def _gated_apart(op: ops.GatedLinear, to: LaunchList) -> None:
    """Record two products, of which the first is written to scratch memory, and the activation."""
    out, width, count = to.at(op.out), op.out.width, op.x.count
    rounded = max(_rounded_bytes(to.weights[spec.name].format, op.x.width) for spec in (op.gate, op.up))
    parts: tuple[Part, ...] = ((rounded, _INT8), (width, _FLOAT32))

    def gate(step: StepArrays) -> DeviceArray:
        return carve(step.scratch, step.counts[count], parts)[1]

    _product(op.x, op.gate, None, gate, to)
    _product(op.x, op.up, None, out, to)
    block = row_block(width)
    to.add(
        "gated_activation",
        lambda step: (step.counts[count], -(-width // block), 1),
        lambda step: (out(step), gate(step), out(step), width, width, 0.0),
        ACTIVATION=activation_name(op.activation),
        BLOCK=block,
    )


def product_scratch_bytes(op: Op, formats: Mapping[str, str]) -> int:
    """Return the bytes of scratch memory that products of a row take, by the formats of weights."""
    matrices = [spec for spec in op.weights() if len(spec.shape) > 1]
    rounded = max((_rounded_bytes(formats[spec.name], spec.shape[-1]) for spec in matrices), default=0)
    if isinstance(op, ops.GatedLinear) and not are_fused(formats[op.gate.name], formats[op.up.name]):
        rounded += row_bytes([(op.out.width, _FLOAT32)])
    return rounded


def _rounded_bytes(format: str, width: int) -> int:
    return row_bytes(rounded_row(format, width))


def _float_rows(x: Value, format: str, to: LaunchList) -> Arrays:
    """Record what products with floats in a format need rounded before; return where the rows are."""
    count = x.count
    if format != "bf16":
        return unrounded(to.at(x))

    def is_large(step: StepArrays) -> bool:
        return size_of(step.counts[count]) == LARGE

    return _once(
        x,
        "bf16",
        to,
        lambda: rounded_floats(to, to.at(x), lambda step: step.counts[count], x.width, is_large),
    )


def _coded_rows(x: Value, weight: CodedArguments, to: LaunchList) -> Arrays:
    """Record the quantization of a value for codes; return where it lies."""
    count = x.count
    return _once(
        x,
        weight.rounding,
        to,
        lambda: rounded_rows(to, to.at(x), lambda step: step.counts[count], x.width, weight),
    )


def _rounded(x: Value, weight: DeviceWeight, to: LaunchList) -> Arrays:
    """Record the quantization of a value for integers; return where it lies."""
    count, scaled = x.count, weight.format == "int8"
    return _once(
        x, scaled, to, lambda: quantized_rows(to, to.at(x), lambda step: step.counts[count], x.width, scaled)
    )


def _once(x: Value, how: object, to: LaunchList, record: Callable[[], Arrays]) -> Arrays:
    """Return where a value was rounded last, if it was and in this way, or record that it is."""
    if to.rounded is None or to.rounded[:2] != (x.index, how):
        to.rounded = (x.index, how, record())
    return to.rounded[2]
