"""Products of many matrices as launches: each row of a result has one matrix, that of an expert or a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.backends.cuda.accelerator import Constant, DeviceArray, Launch
from quire.backends.cuda.coded_form import CodedForm
from quire.backends.cuda.coded_launches import CodedArguments, coded_tiles, rounded_rows
from quire.backends.cuda.kernels.product_variants import PRECISIONS, grouped_quantized_tile, grouped_tile
from quire.backends.cuda.kernels.variant import LARGE, MOST_EXPERTS, row_block, size_of
from quire.backends.cuda.launch_list import product_grid
from quire.backends.cuda.rounding import FLOAT_TYPES, QUANTIZED, quantized_rows, rounded_floats, unrounded
from quire.backends.cuda.weights import DeviceWeight, spans_of
from quire.program.program import WeightSpec
from quire.quantize.groups import ceil_div

if TYPE_CHECKING:
    from quire.backends.cuda.launch_list import Arrays, At, LaunchList
    from quire.backends.cuda.step_arrays import StepArrays

Tile = Callable[[int], Mapping[str, Constant]]  # the constants for so many rows


class GroupedProducts:
    """Products of pairs of a token and one of `number` matrices (kernels.grouped).

    `count` returns the pairs of a step, `listed` these in order of their matrices, and where those of each
    begin.
    """

    def __init__(
        self,
        to: LaunchList,
        number: int,
        count: Callable[[StepArrays], int],
        listed: Callable[[StepArrays], tuple[DeviceArray, DeviceArray]],
    ) -> None:
        self._to, self._number, self._count, self._listed = to, number, count, listed
        self._rounded: tuple[At, object, Arrays] | None = None

    def is_ordered(self, matrix: WeightSpec) -> bool:
        """Return whether each matrix has its inputs in an order of its own."""
        return is_ordered(self._to.weights[matrix.name].format)

    def order_inputs(
        self, out: At, x: At, pairs_of_row: int, matrix: WeightSpec, picked: At | None = None
    ) -> None:
        """Record that `out` [pairs, in] gets x in the order of each pair's matrix, to be multiplied by it.

        The matrix of a pair is what is `picked`, or else its number modulo that of the matrices.
        """
        weight, to, width = self._to.weights[matrix.name], self._to, matrix.shape[-1]
        if (form := weight.form) is None or (order := CodedArguments.of(weight, form, to.none).order) is None:
            raise ValueError(f"{matrix.name} has its inputs in order")
        block, nothing = row_block(width), to.constant(np.zeros(1, np.int32))
        to.add(
            "order_inputs",
            lambda step: (self._count(step), ceil_div(width, block), 1),
            lambda step: (
                *(out(step), x(step), order, picked(step) if picked else nothing),
                *(width, pairs_of_row, self._number),
            ),
            PICKED=picked is not None,
            BLOCK=block,
        )

    def multiply(
        self, out: At, x: At, pairs_of_row: int, matrix: WeightSpec, bias: WeightSpec | None = None
    ) -> None:
        """Record the product of x, whose rows have so many pairs each, and each pair's matrix.

        Its inputs are in the order of the matrix (order_inputs).
        """
        weight, outputs = self._to.weights[matrix.name], matrix.shape[-2]
        if (form := weight.form) is not None:
            self._multiply_coded(out, x, pairs_of_row, weight, form, bias)
            return
        tile: Tile = grouped_quantized_tile
        if weight.format in QUANTIZED:
            kernel, rows = "grouped_quantized_product", self._quantized(x, pairs_of_row, weight)
            size = spans_of(matrix.shape[-1])
            how: dict[str, Constant] = {"KIND": weight.format}
        else:
            kernel, kind = "grouped_product", FLOAT_TYPES[weight.format]
            rows = self.floats(x, pairs_of_row, matrix.shape[-1], weight.format)
            size, tile, how = matrix.shape[-1], float_tile(kind), {"PRECISION": PRECISIONS[kind]}
        arrays, sizes = (*weight.arrays, self._to.array(bias)), (outputs, size, self._number, pairs_of_row)
        self.record(
            kernel,
            outputs,
            lambda step: (out(step), *rows(step), *self._listed(step), *arrays, *sizes),
            tile,
            {**how, "BIAS": bias is not None},
        )

    def _multiply_coded(
        self,
        out: At,
        x: At,
        pairs_of_row: int,
        weight: DeviceWeight,
        form: CodedForm,
        bias: WeightSpec | None,
    ) -> None:
        """Record the same of matrices of codes."""
        coded, (*_, outputs, inputs) = CodedArguments.of(weight, form, self._to.none), weight.shape
        if form.kind.is_float:
            kernel, rows, size = "grouped_coded_float_product", unrounded(x), inputs
        else:
            kernel, size = "grouped_coded_product", spans_of(inputs)
            rows = self._coded(x, pairs_of_row, inputs, coded)
        arrays, sizes = (*coded.arrays, self._to.array(bias)), (outputs, size, self._number, pairs_of_row)
        rest = (*sizes, *coded.numbers, int(bias is not None))
        self.record(
            kernel,
            outputs,
            lambda step: (out(step), *rows(step), *self._listed(step), *arrays, *rest),
            coded_tiles(form),
            {},
        )

    def record(
        self,
        kernel: str,
        outputs: int,
        args: Callable[[StepArrays], tuple[Any, ...]],
        tile: Tile,
        constants: Mapping[str, Constant],
    ) -> None:
        """Record a product whose programs find their matrix: no more tiles than pairs, or than are filled."""
        number = self._number

        def launch(step: StepArrays) -> Launch:
            pairs = self._count(step)
            own = tile(ceil_div(pairs, number))
            tiles = min(pairs, pairs // int(own["BLOCK_M"]) + number)
            grid = product_grid(tiles, outputs, own)
            return Launch(kernel, grid, args(step), {**constants, **own, "EXPERTS": MOST_EXPERTS})

        self._to.launches.append(launch)

    def floats(self, x: At, pairs_of_row: int, width: int, format: str) -> Arrays:
        """Record what products with floats in a format need rounded before; return where the rows are."""
        rows = self._rows(pairs_of_row)
        if format != "bf16":
            return unrounded(x)

        def is_large(step: StepArrays) -> bool:
            return size_of(ceil_div(self._count(step), self._number)) == LARGE

        return self._once(x, "bf16", lambda: rounded_floats(self._to, x, rows, width, is_large))

    def _quantized(self, x: At, pairs_of_row: int, weight: DeviceWeight) -> Arrays:
        """Record the quantization of x for integers, unless it is there."""
        scaled, rows = weight.format == "int8", self._rows(pairs_of_row)
        return self._once(x, scaled, lambda: quantized_rows(self._to, x, rows, weight.shape[-1], scaled))

    def _coded(self, x: At, pairs_of_row: int, width: int, weight: CodedArguments) -> Arrays:
        """Record the quantization of x for codes, unless it is there."""
        rows = self._rows(pairs_of_row)
        return self._once(x, weight.rounding, lambda: rounded_rows(self._to, x, rows, width, weight))

    def _once(self, x: At, how: object, record: Callable[[], Arrays]) -> Arrays:
        """Return where x was quantized last, or record that it is quantized."""
        if self._rounded is None or self._rounded[:2] != (x, how):
            self._rounded = (x, how, record())
        return self._rounded[2]

    def _rows(self, pairs_of_row: int) -> Callable[[StepArrays], int]:
        return lambda step: self._count(step) // pairs_of_row


def is_ordered(format: str) -> bool:
    """Return whether weights in a format have their inputs in an order of their own."""
    form = CodedForm.of_format(format)
    return form is not None and form.ordered > 0


def float_tile(kind: str) -> Tile:
    """Return the constants of products of floats of a format by the rows of each matrix."""
    return lambda rows: grouped_tile(rows, kind)
