"""Products with weights of other formats as launches, and the activations that they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.cuda.accelerator import Constant, DeviceArray, Launch
from quire.backends.cuda.coded_form import CodedForm
from quire.backends.cuda.kernels.coded_variants import GATHERED_BLOCK, WHOLE_ROW_BLOCK, coded_tile
from quire.backends.cuda.scratch import Part, carve
from quire.backends.cuda.weights import DeviceWeight
from quire.program.numerics import SPAN
from quire.quantize.groups import ceil_div

if TYPE_CHECKING:
    from quire.backends.cuda.launch_list import Arrays, At, LaunchList
    from quire.backends.cuda.step_arrays import StepArrays

_ARGUMENTS = ("low", "high", "scales", "scale_codes", "minimums", "minimum_codes")


@dataclass(frozen=True, slots=True)
class CodedArguments:
    """A weight as kernels take it: its arrays, and the numbers after the sizes of a product.

    `order` is that of the inputs, [in] or [matrices, in], if they have one of their own.
    """

    form: CodedForm
    arrays: tuple[DeviceArray, ...]
    numbers: tuple[int, ...]
    order: DeviceArray | None

    @classmethod
    def of(cls, weight: DeviceWeight, form: CodedForm, none: DeviceArray) -> CodedArguments:
        """Arrange a weight; `none` stands for a table that it does not have."""
        named = dict(zip(form.parts(weight.shape), weight.arrays, strict=True))
        floats = form.kind.is_float
        names = _ARGUMENTS[:4] if floats else _ARGUMENTS
        table = (named.get("table", none),) if floats else ()
        numbers = (form.group, form.block, form.brain, *(() if floats else (form.offset,)))
        arrays = tuple(named.get(name, named["low"]) for name in names)
        return cls(form, (*arrays, *table), numbers, named.get("order"))

    @property
    def one_order(self) -> DeviceArray | None:
        """The order of a single matrix; rows for one of several are put into its order before."""
        return self.order if self.order is not None and len(self.order.shape) == 1 else None

    @property
    def rounding(self) -> object:
        """The way in which activations are rounded for it: weights with equal ones share them."""
        order = None if (own := self.one_order) is None else (id(own.buffer), own.first_byte)
        return (self.form.span, self.form.kind.unit, order)


def rounded_rows(
    to: LaunchList, x: At, count: Callable[[StepArrays], int], width: int, weight: CodedArguments
) -> Arrays:
    """Record the quantization of rows of `width` numbers, to the start of scratch memory; return where.

    This is (integers [rows, spans * 128], sums of units [rows, units], scales [rows, spans]).
    """
    form, spans = weight.form, ceil_div(width, SPAN)
    row = coded_row(form, width)

    def parts(step: StepArrays) -> tuple[DeviceArray, ...]:
        return carve(step.scratch, count(step), row)

    if not form.span:

        def whole(step: StepArrays) -> Launch:
            q, _, scales = parts(step)
            args = (q, scales, x(step), width, spans)
            return Launch("quantize_whole_rows", (count(step), 1, 1), args, {"BLOCK": WHOLE_ROW_BLOCK})

        to.launches.append(whole)
        return parts
    own = weight.one_order
    order = to.constant(np.zeros(1, np.int32)) if own is None else own
    to.add(
        "quantize_coded_rows",
        lambda step: (count(step), spans, 1),
        lambda step: (*parts(step), x(step), order, width, int(own is not None)),
        SPAN_INPUTS=form.span,
        UNIT=form.kind.unit,
    )
    return parts


def coded_row(form: CodedForm, width: int) -> tuple[Part, ...]:
    """Return what is kept of a row of activations: integers, sums of units, scales; nothing beside floats."""
    if form.kind.is_float:
        return ()
    inputs = ceil_div(width, SPAN) * SPAN
    scales = inputs // form.span if form.span else 1
    sums = (inputs // form.kind.unit, np.dtype(np.int32))
    return (inputs, np.dtype(np.int8)), sums, (scales, np.dtype(np.float32))


def coded_tiles(form: CodedForm) -> Callable[[int], dict[str, Constant]]:
    """Return the constants of a product by its number of rows."""
    return lambda rows: {**form.kind.constants(), **coded_tile(rows, form.kind)}


def gather_coded(
    weight: DeviceWeight, form: CodedForm, out: At, ids: At, rows: Callable[[StepArrays], int], to: LaunchList
) -> None:
    """Record that rows of a weight are written as float32."""
    count, width = weight.shape
    named = dict(zip(form.parts(weight.shape), weight.arrays, strict=True))
    arrays = tuple(named.get(name, named["low"]) for name in _ARGUMENTS)
    sizes = (named.get("table", to.none), count, width, form.group, form.block, form.brain, form.offset)
    constants = form.kind.constants() | {"SHIFT": form.kind.shift, "BLOCK": GATHERED_BLOCK}
    del constants["UNIT"]
    to.add(
        "gather_coded_rows",
        lambda step: (rows(step), ceil_div(width, GATHERED_BLOCK), 1),
        lambda step: (out(step), ids(step), *arrays, *sizes),
        **constants,
    )
