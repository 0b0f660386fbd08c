"""Matrices of 4-bit floats (sign, then 0 0.5 1 1.5 2 3 4 6) with scales for 16 or 32 inputs.

The layouts that gpt-oss, compressed-tensors, ModelOpt and MLX share: two in a byte, the even input in the
low half. MXFP4 has scales e8m0 for 32 inputs. NVFP4 has scales e4m3 for 16, and a float32 for the matrix, by
which they are multiplied (ModelOpt, MLX) or divided (compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.kinds import Array
from quire.quantize.scales import FORMATS, ScaleForm, Scales
from quire.weights.formats.raw import WEIGHT, QuantizedWeight, RawTensors, coded

Factor = Literal["times", "over"]
_E4M3 = FORMATS["e4m3"]


def mxfp4_weight(raw: RawTensors, name: str, packed: str, scales: str) -> QuantizedWeight:
    """Return the MXFP4 weight `name`, with the tensors `scales` and `packed`.

    `packed` is [..., out, in / 2] or [..., out, in / 32, 16], `scales` is u8 [..., out, in / 32].
    """
    shape = _shape(raw, packed)
    raw.need(scales, "U8", "F8_E8M0")
    raw.need_shape(scales, (*shape[:-1], -(-shape[-1] // 32)))
    storage = CodedStorage("mxfp4", 4, "fp4", 32 if shape[-1] > 32 else None, ScaleForm("e8m0"))

    def read() -> Coded:
        return coded(storage, shape[-1], _bytes(raw, packed, shape), Scales(raw.read(scales)))

    return raw.weight("", shape, storage, (packed, scales), read, name)


def nvfp4_weight(
    raw: RawTensors, name: str, packed: str, scales: str, factor: str | None, how: Factor
) -> QuantizedWeight:
    """Return the NVFP4 weight `name`, whose scales are multiplied or divided by the number in `factor`."""
    shape = _shape(raw, packed)
    raw.need(scales, "F8_E4M3", "U8")
    raw.need_shape(scales, (*shape[:-1], -(-shape[-1] // 16)))
    parts: tuple[str, ...] = (packed, scales)
    if factor is not None:
        raw.need(factor, "F32")
        raw.need_shape(factor, (), (1,), (1, 1))
        parts = (*parts, factor)
    divided = how == "over"  # a quotient is no product of float32 numbers
    form = ScaleForm("f32", "e4m3", 8, 0, divided)
    storage = CodedStorage("nvfp4", 4, "fp4", 16 if shape[-1] > 16 else None, form)

    def read() -> Coded:
        codes = raw.read(scales).view(_E4M3)
        number = np.float32(1) if factor is None else np.float32(raw.read(factor).reshape(-1)[0])
        own = Scales(np.full((*shape[:-1], 1), number, np.float32), codes, 0, divided=divided)
        return coded(storage, shape[-1], _bytes(raw, packed, shape), own)

    return raw.weight("", shape, storage, parts, read, name)


def nvfp4_modules(raw: RawTensors) -> Iterator[QuantizedWeight]:
    """Yield the NVFP4 weights of all modules, as ModelOpt names their tensors."""
    for module in raw.modules(".weight_scale"):
        weight = module + WEIGHT
        if raw.need(weight).dtype == "U8":
            scale, second = module + ".weight_scale", module + ".weight_scale_2"
            raw.need(second)
            yield nvfp4_weight(raw, weight, weight, scale, second, "times")


def _shape(raw: RawTensors, packed: str) -> tuple[int, ...]:
    """Return [..., out, in] of packed codes."""
    entry = raw.need(packed, "U8", "U32", "I8", "F4")
    shape = entry.shape
    if entry.dtype == "U32":
        shape = (*shape[:-1], shape[-1] * 4 if shape else 0)
    if not packed.endswith(WEIGHT) and len(shape) == 4 and shape[-1] == 16:
        shape = (*shape[:-2], shape[-2] * 16)
    if len(shape) < 2:
        raise raw.fault(packed, f"has shape {list(entry.shape)}, which is no matrix")
    return (*shape[:-1], shape[-1] if entry.dtype == "F4" else shape[-1] * 2)


def _bytes(raw: RawTensors, packed: str, shape: tuple[int, ...]) -> Array:
    held = raw.read(packed)
    return np.ascontiguousarray(held).view(np.uint8).reshape(*shape[:-1], shape[-1] // 2)
