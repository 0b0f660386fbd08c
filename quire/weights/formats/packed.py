"""Integers as compressed-tensors stores them: packed into 32-bit words, or in bytes."""

from __future__ import annotations

import numpy as np

from quire.quantize.coded import Coded, CodedStorage, pack_codes, unpack_codes
from quire.quantize.kinds import Array
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.bits import in_order, padded_words, stream
from quire.weights.formats.raw import SCALES, QuantizedWeight, RawTensors, coded
from quire.weights.formats.settings import Settings

_KIND = "compressed-tensors"


def packed_weight(raw: RawTensors, module: str, scheme: Settings) -> QuantizedWeight:
    """Return the weight of a module whose integers are packed into words."""
    bits = scheme.integer("num_bits", low=2, high=8)
    packed, zeros, index = (f"{module}.weight_{part}" for part in ("packed", "zero_point", "g_idx"))
    out, words = raw.need(packed, "I32", dims=2).shape
    parts = [packed, module + ".weight_scale"]
    width = words * 32 // bits
    if module + ".weight_shape" in raw:
        parts.append(module + ".weight_shape")
        width = _stated_width(raw, parts[-1], out)
    if words not in _lengths(width, bits):
        raise raw.fault(packed, f"has {words} words a row, not those of {width} integers of {bits} bits")
    scales, group = _scales(raw, module, (out, width), scheme)
    symmetric, order = scheme.flag("symmetric", default=True), None
    if zeros in raw:
        raw.need(zeros, "I32", "I8", dims=2)
        raw.need_shape(zeros, (out, scales[1]), *((n, scales[1]) for n in _lengths(out, bits)))
        parts.append(zeros)
    elif not symmetric:
        raise raw.fault(zeros, "is missing, though quantization_config has symmetric false")
    if index in raw:
        parts.append(index)
        order = None if (raw.read(index) < 0).any() else raw.order(index, group or width)
    form = ScaleForm(SCALES[raw.need(parts[1], *SCALES).dtype])
    table = "offset" if symmetric else "unsigned"
    storage = CodedStorage(_KIND, bits, table, group, form, zeros=not symmetric, ordered=order is not None)

    def read() -> Coded:
        codes = _row_streams(raw.read(packed), bits, width)
        if order is not None:
            codes = _in_order(codes, bits, order)
        own = Scales(_of_groups(raw.read(parts[1]), scales))
        held = _zeros(raw, zeros, bits, out, symmetric) if zeros in raw else None
        return coded(storage, width, codes, own, zeros=held, order=order)

    return raw.weight(module, (out, width), storage, tuple(parts), read)


def integer_weight(raw: RawTensors, module: str, scheme: Settings, by_row: bool) -> QuantizedWeight:
    """Return the weight of a module whose integers have a byte each; `by_row` activations are rounded too."""
    weight, zeros = module + ".weight", module + ".weight_zero_point"
    shape = raw.need(weight, "I8", dims=2).shape
    out, width = shape
    scales, group = _scales(raw, module, (out, width), scheme)
    symmetric, parts = scheme.flag("symmetric", default=True), [weight, module + ".weight_scale"]
    if zeros in raw:
        raw.need(zeros, "I8")
        raw.need_shape(zeros, scales, (out,), raw.need(parts[1]).shape)
        parts.append(zeros)
    elif not symmetric:
        raise raw.fault(zeros, "is missing, though quantization_config has symmetric false")
    form = ScaleForm(SCALES[raw.need(parts[1], *SCALES).dtype])
    storage = CodedStorage(
        _KIND,
        8,
        "signed" if symmetric else "unsigned",
        group,
        form,
        zeros=not symmetric,
        by_row=by_row and symmetric and group is None,
    )

    def read() -> Coded:
        codes, own = raw.read(weight).view(np.uint8), Scales(_of_groups(raw.read(parts[1]), scales))
        if symmetric:
            if zeros in raw and raw.read(zeros).any():
                raise raw.fault(zeros, "has zero points, though quantization_config has symmetric true")
            return coded(storage, width, codes, own)
        held = _of_groups(raw.read(zeros).view(np.uint8) ^ np.uint8(128), scales)
        return coded(storage, width, codes ^ np.uint8(128), own, zeros=held)

    return raw.weight(module, (out, width), storage, tuple(parts), read)


def _scales(
    raw: RawTensors, module: str, shape: tuple[int, int], scheme: Settings
) -> tuple[tuple[int, int], int | None]:
    """Return the shape [out, groups] of the scales, and the inputs of a group, None if it is a row."""
    out, width = shape
    name, size = module + ".weight_scale", scheme.integer("group_size", default=-1, low=-1)
    if size in (-1, 0) or size >= width:
        single = ((1,), (1, 1), ()) if scheme.get("strategy", default="tensor") == "tensor" else ()
        raw.need_shape(name, (out, 1), (out,), *single)
        return (out, 1), None
    groups = -(-width // size)
    raw.need_shape(name, (out, groups))
    return (out, groups), size


def _of_groups(values: Array, shape: tuple[int, int]) -> Array:
    """Return scales of a tensor or of rows as those of groups, [out, groups]."""
    values = values.reshape(-1, values.shape[-1] if values.ndim == 2 and shape[1] > 1 else 1)
    return np.ascontiguousarray(np.broadcast_to(values, shape))


def _stated_width(raw: RawTensors, name: str, out: int) -> int:
    raw.need(name, "I64", "I32", dims=1)
    raw.need_shape(name, (2,))
    rows, width = raw.read(name).tolist()
    if rows != out or not 0 < width < 1 << 31:
        raise raw.fault(name, f"is [{rows}, {width}], but the packed weight has {out} rows")
    return int(width)


def _lengths(count: int, bits: int) -> tuple[int, int]:
    """Return the words of a stream of integers, and those with 32 // bits each, as older releases packed."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _row_streams(words: Array, bits: int, width: int) -> Array:
    if words.shape[-1] == _lengths(width, bits)[0]:
        return stream(words, bits, width)
    return pack_codes(padded_words(words, bits, width), bits)


def _in_order(codes: Array, bits: int, order: Array) -> Array:
    """Return streams [out, bytes] with the codes in another order (see `in_order`)."""
    padded = np.zeros((len(codes), -(-codes.shape[1] // 4) * 4), np.uint8)
    padded[:, : codes.shape[1]] = codes
    return stream(in_order(padded.view(np.uint32).T, bits, order).T, bits, len(order))


def _zeros(raw: RawTensors, name: str, bits: int, out: int, symmetric: bool) -> Array | None:
    """Return the zero points plus 2^(bits - 1), uint8 [out, groups]; None for symmetric weights."""
    held, middle = raw.read(name), np.uint8(1 << (bits - 1))
    if held.dtype == np.int8:
        zeros = held.view(np.uint8) + middle & np.uint8((1 << bits) - 1)
    else:
        zeros = unpack_codes(_row_streams(held.T, bits, out), bits, out).T
    if not symmetric:
        return np.ascontiguousarray(zeros)
    if (zeros != middle).any():
        raise raw.fault(name, "has zero points, though quantization_config has symmetric true")
    return None
