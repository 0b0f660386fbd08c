"""AWQ, as AutoAWQ and AutoRound write it: the layout named "gemm".

    qweight  i32 [in, out / 8]      eight outputs in a word, in the order 0 2 4 6 1 3 5 7
    qzeros   i32 [groups, out / 8]  zero points, alike
    scales   f16 [groups, out]

W[o, i] = scales[g, o] * (q[i, o] - zero[g, o]) for 4-bit q and zeros.
"""

from __future__ import annotations

import numpy as np

from quire.errors import ConfigError
from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.kinds import Array
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.bits import stream
from quire.weights.formats.overrides import Overrides
from quire.weights.formats.raw import BETTER, SCALES, QuantizedWeight, RawTensors, Reading, coded
from quire.weights.formats.settings import Settings

_GEMM = ("gemm", "marlin", "exllama", "ipex")  # the others are kernels for the same layout
_TOGETHER = 1 << 13  # words of eight steps: they stay in the cache
_SHIFTS = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32) * np.uint32(4)  # of output k of a word


def read_awq(settings: Settings, raw: RawTensors) -> Reading:
    """Read every module that has a `qweight`."""
    version = str(settings.get("version", default="gemm")).lower()
    if version not in _GEMM:
        raise ConfigError(f"the AWQ layout {version[:40]!r} is not supported, only 'gemm'", BETTER)
    overrides = Overrides(settings)
    weights = [_weight(overrides.of(module) or settings, raw, module) for module in raw.modules(".qweight")]
    return Reading("AWQ", tuple(weights))


def _weight(settings: Settings, raw: RawTensors, module: str) -> QuantizedWeight:
    if (bits := settings.integer("bits", "w_bit", default=4)) != 4:
        raise settings.fault("bits", bits)
    width, words = raw.need(module + ".qweight", "I32", dims=2).shape
    group = settings.group_size("group_size", "q_group_size", default=128) or max(width, 1)
    if width % group:
        raise raw.fault(module + ".qweight", f"has {width} inputs, which are no groups of {group}")
    raw.need(module + ".qzeros", "I32")
    raw.need_shape(module + ".qzeros", (width // group, words))
    raw.need_shape(module + ".scales", (width // group, words * 8))
    scales = ScaleForm(SCALES[raw.need(module + ".scales", *SCALES).dtype])
    storage = CodedStorage("awq", 4, "unsigned", group if width > group else None, scales, zeros=True)

    def read() -> Coded:
        packed = _by_output(raw.read(module + ".qweight"))
        zeros = np.ascontiguousarray(_values(raw.read(module + ".qzeros")).T)
        own = Scales(np.ascontiguousarray(raw.read(module + ".scales").T))
        return coded(storage, width, packed, own, zeros=zeros)

    parts = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    return raw.weight(module, (words * 8, width), storage, parts, read)


def _values(words: Array) -> Array:
    """Return the integers of words [n, out / 8], uint8 [n, out]."""
    held = np.ascontiguousarray(words).view(np.uint32)[..., None] >> _SHIFTS & np.uint32(15)
    return held.astype(np.uint8).reshape(len(words), -1)


def _by_output(words: Array) -> Array:
    """Return words [in, out / 8] as streams along the inputs, uint8 [out, ceil(in / 2)]."""
    width, count = words.shape
    step = 8 * max(1, _TOGETHER // max(count, 1))
    packed = np.empty((count, 8, -(-width // 8)), np.uint32)
    for first in range(0, width, step):
        held = np.ascontiguousarray(words[first : first + step]).view(np.uint32)
        for number, shift in enumerate(_SHIFTS):
            codes = held >> shift & np.uint32(15)
            eight = codes[::8].copy()
            for k in range(1, min(8, len(held))):
                row = codes[k::8]
                eight[: len(row)] |= row << np.uint32(4 * k)
            packed[:, number, first // 8 : first // 8 + len(eight)] = eight.T
    return stream(packed.reshape(count * 8, -1), 4, width)
