"""MLX: `quantization` in config.json, and a stream of codes along the inputs in 32-bit words.

    weight  u32 [out, in * bits / 32], or of stacked experts [experts, ., .]
    scales  bf16, f16 or f32 [out, groups]; biases alike.  W = scale * q + bias, q from 0
    scales  u8 e8m0 of 32 inputs (mode mxfp4, and mxfp8 with 8-bit floats) or e4m3 of 16 (nvfp4), no biases

Keys of `quantization` that are names of modules have other settings for one, or false. Stacked experts
(`switch_mlp`) are given apart, under the names that Hugging Face has for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.bits import stream
from quire.weights.formats.fp4 import mxfp4_weight, nvfp4_weight
from quire.weights.formats.raw import SCALES, QuantizedWeight, RawTensors, Reading, coded
from quire.weights.formats.settings import Settings

_MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
_STACKED, _APART = ".switch_mlp.", ".experts.{}."


def read_mlx(settings: Settings, raw: RawTensors) -> Reading:
    """Read every module that has `scales`."""
    weights = [apart for module in raw.modules(".scales") for apart in _apart(_weight(settings, raw, module))]
    return Reading("MLX", tuple(weights))


def _weight(settings: Settings, raw: RawTensors, module: str) -> QuantizedWeight:
    changed = settings.values.get(module)
    if changed is False:
        raise raw.fault(module + ".scales", "is there, though quantization leaves its module out")
    own = Settings({**settings.values, **(changed if isinstance(changed, dict) else {})}, settings.where)
    mode = own.one_of("mode", *_MODES, default="affine")
    weight, scales = module + ".weight", module + ".scales"
    raw.need(weight, "U32")
    if mode == "mxfp4":
        return mxfp4_weight(raw, weight, weight, scales)
    if mode == "nvfp4":
        factor = module + ".global_scale" if module + ".global_scale" in raw else None
        return nvfp4_weight(raw, weight, weight, scales, factor, "times")
    if mode == "mxfp8":
        return _mxfp8(raw, weight, scales)
    return _affine(raw, module, own.integer("bits", low=2, high=8), own.integer("group_size"))


def _affine(raw: RawTensors, module: str, bits: int, group: int) -> QuantizedWeight:
    weight, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    *leading, words = raw.need(weight).shape
    width = words * 32 // bits
    form = ScaleForm(SCALES[raw.need(scales, *SCALES).dtype])
    raw.need_shape(scales, (*leading, -(-width // group)))
    minimums = ScaleForm(SCALES[raw.need(biases, *SCALES).dtype])
    raw.need_shape(biases, (*leading, -(-width // group)))
    if len(leading) < 1 or words * 32 % bits:
        raise raw.fault(weight, f"has {words} words a row, which are no integers of {bits} bits")
    size = group if group < width else None
    storage = CodedStorage("mlx", bits, "unsigned", size, form, minimums)

    def read() -> Coded:
        packed = stream(raw.read(weight), bits, width)
        return coded(storage, width, packed, Scales(raw.read(scales)), minimums=Scales(raw.read(biases)))

    return raw.weight(module, (*leading, width), storage, (weight, scales, biases), read)


def _mxfp8(raw: RawTensors, weight: str, scales: str) -> QuantizedWeight:
    *leading, words = raw.need(weight).shape
    raw.need(scales, "U8")
    raw.need_shape(scales, (*leading, -(-words * 4 // 32)))
    group = 32 if words * 4 > 32 else None
    storage = CodedStorage("mxfp8", 8, "e4m3", group, ScaleForm("e8m0"))

    def read() -> Coded:
        return coded(storage, words * 4, stream(raw.read(weight), 8, words * 4), Scales(raw.read(scales)))

    return raw.weight("", (*leading, words * 4), storage, (weight, scales), read, weight)


def _apart(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Yield the weights of stacked experts one by one; others unchanged."""
    if _STACKED not in weight.name or len(weight.shape) != 3:
        yield weight
        return
    count = weight.shape[0]
    for expert in range(count):

        def read(expert: int = expert) -> Coded:
            return weight.read()[expert]

        name = weight.name.replace(_STACKED, _APART.format(expert))
        yield replace(weight, name=name, shape=weight.shape[1:], nbytes=weight.nbytes // count, read=read)
