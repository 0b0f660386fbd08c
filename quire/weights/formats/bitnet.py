"""BitNet: weights of -1, 0 and 1 with one scale for a matrix (arXiv:2402.17764), as transformers writes them.

    weight        u8 [out / 4, in]  code + 1 in two bits: bits 2 j of row i are of output j * out / 4 + i
    weight_scale  one number        W = code / scale, with linear_class "autobitlinear" W = code * scale

With quantization_mode "online" weights are floats that the reader rounds: scale = 1 / max(mean |weight|,
1e-5), W = round(weight * scale) / scale in the format of the weight, with codes from -1 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from quire.quantize.coded import Coded, CodedStorage, pack_codes
from quire.quantize.kinds import Array
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.raw import SCALES, WEIGHT, QuantizedWeight, RawTensors, Reading, coded
from quire.weights.formats.settings import Settings

_EACH = 4  # codes of a byte
_SCALE = ".weight_scale"
_LEAST = np.float32(1e-5)
_TABLE = "embed_tokens"  # a matrix that is no product


def read_bitnet(settings: Settings, raw: RawTensors) -> Reading:
    """Read every module that has a `weight_scale`; online, every matrix that is not left out."""
    settings.one_of("use_rms_norm", False, default=False)
    linear_class = settings.one_of("linear_class", "bitlinear", "autobitlinear", default="bitlinear")
    mode = settings.one_of("quantization_mode", "offline", "online", default="offline")
    if mode == "online" and linear_class == "autobitlinear":
        return Reading("BitNet, rounded while loading", tuple(_floats(settings, raw)))
    return Reading("BitNet", tuple(_packed(raw, divided=linear_class == "bitlinear")))


def _packed(raw: RawTensors, divided: bool) -> Iterator[QuantizedWeight]:
    for module in raw.modules(_SCALE):
        rows, width = raw.need(module + WEIGHT, "U8", dims=2).shape
        raw.need_shape(module + _SCALE, (1,), ())
        scale = SCALES[raw.need(module + _SCALE, *SCALES).dtype]
        storage = _storage("f32" if divided else scale)
        parts = (module + WEIGHT, module + _SCALE)
        read = partial(_unpack, raw, storage, *parts, divided)
        yield raw.weight(module, (_EACH * rows, width), storage, parts, read)


def _unpack(raw: RawTensors, storage: CodedStorage, weight: str, scale: str, divided: bool) -> Coded:
    held = raw.read(weight)
    codes = np.concatenate([held >> (2 * j) & 3 for j in range(_EACH)])
    if (codes == 3).any():
        raise raw.fault(weight, "has codes that are none of -1, 0 and 1")
    number = raw.read(scale).reshape(())
    if divided:
        number = np.float32(1) / number.astype(np.float32)
    return _coded(storage, codes + np.uint8(1), number)


def _floats(settings: Settings, raw: RawTensors) -> Iterator[QuantizedWeight]:
    stated = settings.get("modules_to_not_convert") is not None
    left_out = settings.names("modules_to_not_convert") if stated else ("lm_head",)
    for module in raw.modules(WEIGHT):
        entry = raw.need(module + WEIGHT)
        if len(entry.shape) != 2 or module.endswith(_TABLE) or entry.dtype not in SCALES:
            continue
        if not any(module.startswith(name) or module.endswith(name) for name in left_out):
            storage = _storage(SCALES[entry.dtype])
            read = partial(_round, raw, storage, module + WEIGHT)
            yield raw.weight(module, entry.shape, storage, (module + WEIGHT,), read)


def _round(raw: RawTensors, storage: CodedStorage, name: str) -> Coded:
    held = raw.read(name)
    weight = held.astype(np.float32)
    scale = np.float32(1) / max(np.float32(np.abs(weight).mean(dtype=np.float64)), _LEAST)
    codes = np.clip(np.rint(weight * scale), -1, 1)
    return _coded(storage, (codes + 2).astype(np.uint8), (np.float32(1) / scale).astype(held.dtype))


def _storage(scales: str) -> CodedStorage:
    return CodedStorage("bitnet", 2, "offset", None, ScaleForm(scales))


def _coded(storage: CodedStorage, codes: Array, scale: Array) -> Coded:
    """Return the weight of codes from 1 to 3 and one scale, which each output has."""
    out, width = codes.shape
    scales = Scales(np.full((out, 1), scale, scale.dtype))
    return coded(storage, width, pack_codes(codes, 2), scales)
