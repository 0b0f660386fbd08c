"""Weights of other formats in the layout of kernels, in pieces that are packed one by one.

A plane of p bits has 32 bytes for each 8 / p groups of 32 inputs: byte k has the bits of input k of group g
from bit p * g on. Inputs are padded with code 0 to spans of 128. Scales are transposed, [groups, outputs], so
that neighbouring outputs are read together, and padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np

from quire.backends.cuda.coded_form import CodedForm
from quire.program.numerics import GROUP, SPAN
from quire.quantize.coded import Coded
from quire.quantize.kinds import Array
from quire.quantize.scales import Scales

_BF16 = np.dtype(ml_dtypes.bfloat16)
_PIECE = 1 << 22  # codes that are packed at once


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """`num_bytes` bytes of an array of a weight, from `first` on; `make` returns them."""

    array: str
    first: int
    num_bytes: int
    make: Callable[[], Array]


def pieces(weight: Coded, form: CodedForm) -> Iterator[PackedPiece]:
    """Yield all arrays of a weight (CodedForm.parts) in pieces, which are independent of each other."""
    matrices = [weight] if len(weight.shape) == 2 else [weight[i] for i in range(weight.shape[0])]
    outputs, inputs = weight.shape[-2:]
    step = max(1, _PIECE // max(inputs, 1))
    for name, (shape, kind) in form.parts(weight.shape).items():
        size = math.prod(shape[-2:]) * kind.itemsize
        if name == "order":
            yield PackedPiece(name, 0, size, lambda: np.ascontiguousarray(weight.order, np.int32))
        elif name == "table":
            yield PackedPiece(name, 0, size, lambda: np.array(weight.table, np.float32))
        elif name in ("low", "high"):
            for number, first in product(range(len(matrices)), range(0, outputs, step)):
                count, row = min(step, outputs - first), size // outputs
                make = partial(_plane, matrices[number][first : first + count], form, name)
                yield PackedPiece(name, number * size + first * row, count * row, make)
        else:
            for number, matrix in enumerate(matrices):
                yield from _pieces_of_groups(matrix, form, name, number * size)


def _plane(weight: Coded, form: CodedForm, name: str) -> Array:
    """Return the rows of a plane."""
    codes, (low, high) = _codes(weight), form.planes
    bits, shift = (low, 0) if name == "low" else (high, low)
    if bits == 8:
        return codes
    codes = (codes >> shift) & ((1 << bits) - 1)
    together = 8 // bits
    if missing := -codes.shape[1] % (together * GROUP):
        codes = np.pad(codes, ((0, 0), (0, missing)))
    groups = codes.reshape(len(codes), -1, together, GROUP)
    packed = groups[:, :, 0].copy()
    for place in range(1, together):
        packed |= groups[:, :, place] << (bits * place)
    return packed.reshape(len(codes), -1)


def _codes(weight: Coded) -> Array:
    """Return codes as the kernels take them, padded to whole spans: of 8 bits as int8, others unsigned."""
    codes, half = weight.codes(), np.uint8(1 << (weight.bits - 1))
    turned = ("unsigned", "offset") if weight.bits == 8 else ("signed",)
    if weight.bits != 7 and weight.table in turned:
        codes = codes ^ half
    elif weight.bits == 7 and weight.table == "unsigned":
        codes = codes ^ np.uint8(128)
    elif weight.bits == 7:
        codes = (codes ^ half if weight.table == "signed" else codes) - half
    if missing := -codes.shape[1] % SPAN:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    return codes


def _pieces_of_groups(weight: Coded, form: CodedForm, name: str, base: int) -> Iterator[PackedPiece]:
    """Yield scales, or minimums, or one of their levels, [groups or blocks, outputs], some rows a piece."""
    (rows, across), kind = form.parts(weight.shape)[name]
    row = across * kind.itemsize
    step = max(1, _PIECE // row)
    for first in range(0, rows, step):
        count = min(step, rows - first)

        def make(first: int = first, count: int = count) -> Array:
            found, values = np.zeros((count, across), kind), _of_groups(weight, form, name)
            own = values[:, first : first + count]
            found[: own.shape[1], : own.shape[0]] = own.view(kind).T
            return found

        yield PackedPiece(name, base + first * row, count * row, make)


def _of_groups(weight: Coded, form: CodedForm, name: str) -> Array:
    """Return scales, or minimums, or one of their levels, [outputs, groups or blocks]."""
    if name == "minimums" and weight.zeros is not None:
        return weight.zeros
    scales = weight.scales if name.startswith("scale") else weight.minimums
    if scales is None:
        raise ValueError(f"{weight.kind} has no {name}")
    return _level(scales, form, of_codes=name.endswith("codes"))


def _level(scales: Scales, form: CodedForm, of_codes: bool) -> Array:
    """Return the codes of scales, or their values, in the number format of the kernels."""
    if of_codes and scales.codes is not None:
        return scales.codes
    if form.kind.scales == "32":
        return scales.floats()
    if scales.codes is None and scales.values.dtype not in (np.float16, _BF16):
        return scales.floats().astype(_BF16 if form.brain else np.float16)  # exact
    return scales.values
