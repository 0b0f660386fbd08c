"""Coded: weights of formats made elsewhere, with their codes and scales as they are.

    W = scale * number(code)                       scale of the group
    W = scale * number(code) + minimum             minimum of the group
    W = scale * (number(code) - zero)              zero of the group

in float32 and in this order, so that `dense` equals the format's own dequantization bit for bit. Codes have 2
to 8 bits, and a table says what number a code means. A format that subtracts a minimum is stored with the
minimum negated, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from quire.program.numerics import matmul
from quire.quantize.coded_product import coded_matmul, row_matmul
from quire.quantize.groups import ceil_div
from quire.quantize.kinds import Array, Floats, StoredWeight, Which, require
from quire.quantize.scales import ScaleForm, Scales

# The numbers of 4-bit codes.
_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
_TABLES = {"iq4nl": _IQ4NL, "fp4": _FP4}
_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

Table = str | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CodedStorage:
    """The storage kind of Coded, known before its data.

    `kind` is the name of the format, `group` the inputs that share a scale, or None if all of a row do.
    """

    kind: str
    bits: int
    table: Table
    group: int | None
    scales: ScaleForm
    minimums: ScaleForm | None = None
    zeros: bool = False
    ordered: bool = False
    by_row: bool = False

    @property
    def is_float(self) -> bool:
        return False

    @property
    def integers(self) -> bool:
        """True if codes are integers up to a factor, which meet rounded activations in a product."""
        return self.table in ("unsigned", "offset", "signed", *_TABLES)

    def groups(self, width: int) -> int:
        """Return the number of groups of a row."""
        return ceil_div(width, self.group or max(width, 1))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        groups, width = self.groups(shape[-1]), shape[-1]
        row = ceil_div(width * self.bits, 8) + self.scales.nbytes(groups) + self.zeros * groups
        row += 0 if self.minimums is None else self.minimums.nbytes(groups)
        return math.prod(shape[:-1]) * row + self.ordered * math.prod(shape[:-2]) * width * 4

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the numbers of a matrix, its scales and, as float64, a group of inputs."""
        outputs, inputs = shape[-2:]
        return outputs * (6 * inputs + 8 * self.groups(inputs) + 8 * (min(self.group or 128, 128) + 3))

    def __str__(self) -> str:
        groups = f"groups of {self.group}" if self.group else "a scale for each output"
        parts = [f"{self.bits} bits", groups, f"{self.scales} scales"]
        if self.minimums is not None:
            parts[-1] += " and minimums"
        if self.zeros:
            parts[-1] += " and zero points"
        if self.ordered:
            parts.append("inputs in another order")
        if self.by_row:
            parts.append("activations of 8 bits")
        return f"{self.kind} ({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Coded(StoredWeight):
    """Codes of `bits` bits with scales for groups of inputs.

    `kind` names the format. `packed` uint8 [..., out, ceil(width * bits / 8)] is a little-endian stream of
    bits along the inputs (see `pack_codes`). `table` says what number a code means: "unsigned", "offset"
    (code - 2^(bits - 1)), "signed" (two's complement), "iq4nl", "fp4", "e4m3", "e5m2", or 2^bits floats.
    `group` inputs share a scale, or all of a row if None. `zeros` uint8 [..., out, groups]. With `order`
    int32 [..., in], column j of the stored matrix is input order[j]. `by_row` is True if the format rounds
    activations to int8 with one scale for a row (W8A8): weights then are integers with one for an output.
    """

    kind: str
    packed: Array
    bits: int
    width: int
    table: Table
    group: int | None
    scales: Scales
    minimums: Scales | None = None
    zeros: Array | None = None
    order: Array | None = None
    by_row: bool = False

    def __post_init__(self) -> None:
        named = self.table in ("unsigned", "offset", "signed", *_TABLES, *_FP8)
        require(2 <= self.bits <= 8, "codes have 2 to 8 bits")
        require(named or not isinstance(self.table, str), f"no table is named {self.table!r}")
        require(isinstance(self.table, str) or len(self.table) == 1 << self.bits, "a table has 2^bits floats")
        require(self.table not in _TABLES or self.bits == 4, f"codes of {self.table} have 4 bits")
        require(self.table not in _FP8 or self.bits == 8, f"codes of {self.table} have 8 bits")
        require(self.packed.dtype == np.uint8, "packed codes are uint8")
        require(self.packed.shape[-1] == ceil_div(self.width * self.bits, 8), "packed has another width")
        expected = (*self.shape[:-1], self.storage.groups(self.width))
        for scales in filter(None, (self.scales, self.minimums)):
            require(scales.shape == expected, f"scales have shape {scales.shape}, not {expected}")
        if self.zeros is not None:
            require(self.minimums is None, "a weight has zeros or minimums, not both")
            require(self.table == "unsigned", "zeros belong to unsigned codes")
            require(self.zeros.dtype == np.uint8 and self.zeros.shape == expected, f"zeros are u8 {expected}")
        if self.by_row:
            plain = self.bits == 8 and self.table in ("signed", "offset") and self.group is None
            require(plain and self.minimums is None, "W8A8 has signed integers and one scale for an output")
        if self.order is not None:
            expected = (*self.shape[:-2], self.width)
            require(self.order.dtype == np.int32 and self.order.shape == expected, f"order is i32 {expected}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.minimums, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def storage(self) -> CodedStorage:
        minimums = None if self.minimums is None else self.minimums.form
        rest = (minimums, self.zeros is not None, self.order is not None, self.by_row)
        return CodedStorage(self.kind, self.bits, self.table, self.group, self.scales.form, *rest)

    def codes(self) -> Array:
        """Return the codes unpacked, uint8 [..., out, in]."""
        return unpack_codes(self.packed, self.bits, self.width)

    def dense(self) -> Floats:
        scale = self._by_input(self.scales.floats())
        numbers = _numbers(self.codes(), self.bits, self.table)
        if self.zeros is not None:
            numbers = numbers - self._by_input(self.zeros).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # infinite or NaN scales are valid
            dense = scale * numbers
            if self.minimums is not None:
                dense = dense + self._by_input(self.minimums.floats())
        if self.order is None:
            return dense
        ordered = np.empty_like(dense)
        index = np.broadcast_to(self.order[..., None, :], dense.shape)
        np.put_along_axis(ordered, index, dense, axis=-1)
        return ordered

    def _by_input(self, of_groups: Array) -> Array:
        """Repeat what groups have for each of their inputs."""
        return np.repeat(of_groups, self.group or max(self.width, 1), axis=-1)[..., : self.width]

    def rows(self, ids: Array) -> Floats:
        return self[ids].dense()

    def product(self, x: Floats) -> Floats:
        """Return x [T, in] times the matrix transposed, [T, out].

        Activations are rounded if codes are integers: see `coded_matmul`.
        """
        if not self.storage.integers:
            return matmul(x, self.dense())
        if self.order is not None:
            x = x[:, self.order]
        scales, numbers = self.scales.floats(), _numbers(self.codes(), self.bits, self.table)
        if self.by_row:
            return row_matmul(x, numbers, scales[:, 0])
        if self.table == "fp4":  # twice the numbers are integers
            scales, numbers = scales * np.float32(0.5), numbers * np.float32(2)
        minimums = None if self.minimums is None else self.minimums.floats()
        if self.zeros is not None:
            minimums = -(scales * self.zeros.astype(np.float32))
        return coded_matmul(x, numbers, scales, minimums, self.group, self.bits)

    def __getitem__(self, index: Any) -> Coded:
        """Select along the first axis: an expert of [experts, out, in], or outputs of a matrix."""
        order = self.order
        if order is not None and len(self.shape) > 2:
            order = order[index]
        return self._map(lambda array: array[index], order)

    def outputs(self, which: Which, axis: int = -2) -> Coded:
        require(axis == -2, f"{self.kind} has no outputs along axis {axis}")
        return self._map(lambda array: array[..., which, :], self.order)

    def split(self, count: int) -> Coded:
        order = None if self.order is None else np.broadcast_to(self.order, (count, self.order.shape[-1]))
        return self._map(lambda array: array.reshape(count, -1, array.shape[-1]), order)

    def transposed(self) -> Coded:
        raise ValueError(f"{self.kind} cannot be transposed: its groups are along the inputs")

    @classmethod
    def stack(cls, parts: Sequence[Coded]) -> Coded:
        if len(parts) == 1:
            return parts[0]._map(np.ascontiguousarray, parts[0].order)
        first = parts[0]
        require(all(part.storage == first.storage for part in parts), "the parts have different storage")
        minimums = [part.minimums for part in parts if part.minimums is not None]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        orders = [part.order for part in parts if part.order is not None]
        return replace(
            first,
            packed=np.stack([part.packed for part in parts]),
            scales=Scales.stack([part.scales for part in parts]),
            minimums=Scales.stack(minimums) if minimums else None,
            zeros=np.stack(zeros) if zeros else None,
            order=np.stack(orders) if orders else None,
        )

    def _map(self, change: Callable[[Array], Array], order: Array | None) -> Coded:
        return replace(
            self,
            packed=change(self.packed),
            scales=self.scales.map(change),
            minimums=None if self.minimums is None else self.minimums.map(change),
            zeros=None if self.zeros is None else change(self.zeros),
            order=order,
        )


def _numbers(codes: Array, bits: int, table: Table) -> Floats:
    """Return the numbers that codes mean, as float32."""
    if table == "unsigned":
        return codes.astype(np.float32)
    if table == "offset":
        return codes.astype(np.float32) - np.float32(1 << (bits - 1))
    if table == "signed":
        half = np.uint8(1 << (bits - 1))
        return (codes ^ half).astype(np.float32) - np.float32(half)
    if isinstance(table, str) and table in _FP8:
        return codes.view(_FP8[table]).astype(np.float32)
    numbers = _TABLES[table] if isinstance(table, str) else table
    return np.array(numbers, np.float32)[codes]


def pack_codes(codes: Array, bits: int) -> Array:
    """Pack codes [..., in]: bit b of code k is bit `bits` * k + b of a row's little-endian stream.

    Returns uint8 [..., ceil(in * bits / 8)]. Codes of 4 bits are packed as `integers.pack` does.
    """
    if bits == 8:
        return codes.astype(np.uint8)
    width = codes.shape[-1]
    eights = ceil_div(width, 8)
    padded = np.zeros((*codes.shape[:-1], eights * 8), np.uint8)
    padded[..., :width] = codes
    padded = padded.reshape(*codes.shape[:-1], eights, 8)
    out = np.zeros((*codes.shape[:-1], eights, bits), np.uint8)
    for k in range(8):
        byte, shift = divmod(bits * k, 8)
        out[..., byte] |= padded[..., k] << shift
        if shift + bits > 8:
            out[..., byte + 1] |= padded[..., k] >> (8 - shift)
    return out.reshape(*codes.shape[:-1], eights * bits)[..., : ceil_div(width * bits, 8)]


def unpack_codes(packed: Array, bits: int, width: int) -> Array:
    """Invert `pack_codes`: return uint8 [..., width]."""
    if bits == 8:
        return packed
    eights = ceil_div(width, 8)
    padded = packed
    if packed.shape[-1] != eights * bits:
        padded = np.zeros((*packed.shape[:-1], eights * bits), np.uint8)
        padded[..., : packed.shape[-1]] = packed
    padded = padded.reshape(*packed.shape[:-1], eights, bits)
    out = np.empty((*packed.shape[:-1], eights, 8), np.uint8)
    for k in range(8):
        byte, shift = divmod(bits * k, 8)
        code = padded[..., byte] >> shift
        if shift + bits > 8:
            code |= padded[..., byte + 1] << (8 - shift)
        out[..., k] = code & ((1 << bits) - 1)
    return out.reshape(*packed.shape[:-1], eights * 8)[..., :width]
