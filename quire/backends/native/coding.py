"""Weights of other formats in the native core: which have a kernel, by what name, and their packing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.backends.native import _core
from quire.errors import ConfigError
from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.coded_product import summed_together
from quire.quantize.groups import ceil_div
from quire.quantize.kinds import Array, Storage
from quire.quantize.scales import ScaleForm, Scales

_BLOCK = 256  # inputs: kCodedBlock of csrc/kernels/coding.h
_GROUPS = (4, 8, 16, 32, 64, 128)
# The bits that are all set in an 8-bit float that is not finite.
_FLOAT8 = {"e4m3": 0x7F, "e5m2": 0x7C}


def format_of(storage: Storage) -> str:
    """Return the name of the packed format of a weight: "f32" if no kernel multiplies its kind."""
    if not isinstance(storage, CodedStorage):
        return storage.kind
    meaning = _meaning(storage)
    group = _packed_group(storage.group)
    if not meaning or group not in (*_GROUPS, _BLOCK):
        return "f32"
    two_levels = any(form and form.codes for form in (storage.scales, storage.minimums))
    if two_levels and storage.group not in (None, group):
        return "f32"
    scales, minimums = _form(storage.scales, group), _form(storage.minimums, group)
    if (scales == "f16_u6") != (minimums == "f16_u6") or "" in (scales, minimums):
        return "f32"
    if meaning in (*_FLOAT8, "floats") and minimums != "none":
        return "f32"
    zeros, order = "zeros" if storage.zeros else "none", " ordered" if storage.ordered else ""
    bits = 8 if storage.bits == 7 else storage.bits
    return f"coded {bits} {group} {meaning} {scales} {minimums} {zeros}{order}"


def _packed_group(group: int | None) -> int:
    """Return the inputs that share a scale in panels: of groups of odd sizes, each part has a copy."""
    if group is None or group % _BLOCK == 0:
        return _BLOCK
    return summed_together(group)


def _meaning(storage: CodedStorage) -> str:
    """Return what codes mean to the core (Meaning in csrc/kernels/coding.h); "" if it has no such table."""
    if not isinstance(storage.table, str):
        return "floats" if storage.bits == 4 else ""
    if storage.by_row:
        return "rows"
    return "offset" if storage.table == "signed" else storage.table


def _form(form: ScaleForm | None, group: int) -> str:
    """Return the name of the core's ScaleForm; "" if it has none."""
    if form is None:
        return "none"
    if form.codes is None:
        return form.values if form.values in ("f16", "bf16", "f32", "e8m0") else ""
    if (form.values, form.codes, form.together) == ("f32", "e4m3", 0):
        return "e4m3_over_f32" if form.divided else "f32_e4m3"
    if form.values != "f16" or group == _BLOCK or form.together not in (0, _BLOCK // group):
        return ""
    if form.codes == "u8" and form.code_bits <= 6 and group == 32:
        return "f16_u6"
    return "f16_i8" if form.codes == "i8" or form.code_bits < 8 else ""


def packing_of(matrix: _core.Matrix, index: int, weight: Coded) -> Callable[[int, int], bool]:
    """Return a function that fills panels [first, last) of a matrix from a weight [out, in]."""
    scales, scale_codes = _arrays(weight.scales)
    minimums, minimum_codes = _arrays(weight.minimums)
    zeros = None if weight.zeros is None else np.ascontiguousarray(weight.zeros)
    packed = weight.packed if weight.packed.strides[-1] == 1 else np.ascontiguousarray(weight.packed)
    group, signed = weight.group or weight.width, weight.table == "signed"
    if weight.bits == 7:
        packed, signed = _as_bytes(weight), False
    if weight.group is not None and (part := _packed_group(group)) < group and part != _BLOCK:
        copies, groups = group // part, ceil_div(weight.width, part)
        zeros, scales, minimums = (
            None if numbers is None else np.ascontiguousarray(np.repeat(numbers, copies, axis=-1)[:, :groups])
            for numbers in (zeros, scales, minimums)
        )
        group = part
    unreal = _FLOAT8.get(weight.table) if isinstance(weight.table, str) else None
    if unreal is not None and ((packed & unreal) == unreal).any():
        raise ConfigError(f"a weight of {weight.storage} has codes that are not finite", "fetch it again")
    order = None if weight.order is None else np.ascontiguousarray(weight.order)
    table = None if isinstance(weight.table, str) else np.array(weight.table, np.float32)
    parts = (packed, group, signed, scales, scale_codes, minimums, minimum_codes, zeros, order, table)

    def pack(first: int, last: int) -> bool:
        _core.pack_codes(matrix, index, *parts, first, last)
        return True

    return pack


def _as_bytes(weight: Coded) -> Array:
    """Return codes of 7 bits as those of 8 that mean the same, signed ones as offset."""
    if weight.table == "unsigned":
        return weight.codes()
    half = np.uint8(64)
    return (weight.codes() ^ half if weight.table == "signed" else weight.codes()) + half


def _arrays(scales: Scales | None) -> tuple[Array | None, Array | None]:
    """Return values and codes as contiguous integers of their size."""
    if scales is None:
        return None, None
    values = np.ascontiguousarray(scales.values)
    codes = None if scales.codes is None else np.ascontiguousarray(scales.codes).view(np.uint8)
    return values.view(f"u{values.itemsize}"), codes
