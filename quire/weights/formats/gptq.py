"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it.

    qweight  i32 [in * bits / 32, out]      integers, a stream along the inputs
    qzeros   i32 [groups, out * bits / 32]  zero points, a stream along the outputs
    scales   f16 [groups, out]
    g_idx    i32 [in]                       the group of each input; without desc_act missing: i // group_size

W[o, i] = scales[g, o] * (q[i, o] - zero[g, o]). Version 1 of the format, which files have that name none,
stores zero - 1, so 2^bits - 1 for 0. Some writers store the zeros of version 2 and name version 1: those of
symmetric files, which all are 2^(bits - 1), do not depend on the version that is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.quantize.coded import Coded, CodedStorage, unpack_codes
from quire.quantize.kinds import Array
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.bits import in_order, stream
from quire.weights.formats.overrides import Overrides
from quire.weights.formats.raw import SCALES, QuantizedWeight, RawTensors, Reading, coded
from quire.weights.formats.settings import Settings

_BITS = (2, 3, 4, 8)


def read_gptq(settings: Settings, raw: RawTensors) -> Reading:
    """Read every module that has a `qweight`."""
    version = settings.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    weights = _weights(settings, raw, subtracted=version == "gptq")
    return Reading("GPTQ", tuple(weights))


def _weights(settings: Settings, raw: RawTensors, subtracted: bool) -> Iterator[QuantizedWeight]:
    overrides = Overrides(settings)
    for module in raw.modules(".qweight"):
        own = overrides.of(module)
        if own is None:
            raise raw.fault(module + ".qweight", "is there, though quantization_config leaves its module out")
        bits = own.one_of("bits", *_BITS)
        group, symmetric = own.group_size("group_size", default=-1), own.flag("sym", default=True)
        found = _Module(raw, module, bits, group, symmetric, subtracted).weight()
        if own.flag("desc_act") and found.storage.group is not None and module + ".g_idx" not in raw:
            raise raw.fault(module + ".g_idx", "is missing, though desc_act says that inputs are in an order")
        yield found


class _Module(NamedTuple):
    """One module, and how its tensors are to be read. `subtracted`: zeros are stored less one."""

    raw: RawTensors
    name: str
    bits: int
    group_size: int | None
    symmetric: bool
    subtracted: bool

    def weight(self) -> QuantizedWeight:
        """Return the weight, after checking the tensors against each other."""
        raw, name = self.raw, self.name
        words, out = raw.need(name + ".qweight", "I32", dims=2).shape
        index = name + ".g_idx"
        indexed = index in raw
        width = raw.need(index, "I32", "I64", dims=1).shape[0] if indexed else words * 32 // self.bits
        group = self.group_size or max(width, 1)
        groups = -(-width // group)
        raw.need_shape(name + ".qweight", (-(-width * self.bits // 32), out))
        raw.need_shape(name + ".scales", (groups, out))
        scales = raw.need(name + ".scales", *SCALES)
        parts = [name + ".qweight", name + ".scales"]
        if not self.symmetric or name + ".qzeros" in raw:
            raw.need(name + ".qzeros", "I32", dims=2)
            raw.need_shape(name + ".qzeros", (groups, -(-out * self.bits // 32)))
            parts.append(name + ".qzeros")
        order = None
        if indexed:
            parts.append(index)
            order = raw.order(index, group)
        storage = CodedStorage(
            "gptq",
            self.bits,
            "offset" if self.symmetric else "unsigned",
            group if groups > 1 else None,
            ScaleForm(SCALES[scales.dtype]),
            zeros=not self.symmetric,
            ordered=order is not None,
        )
        return raw.weight(
            name, (out, width), storage, tuple(parts), lambda: self._read(storage, width, order)
        )

    def _read(self, storage: CodedStorage, width: int, order: Array | None) -> Coded:
        words = self.raw.read(self.name + ".qweight")
        if order is not None:
            words = in_order(words, self.bits, order)
        packed = stream(words.T, self.bits, width)
        scales = Scales(np.ascontiguousarray(self.raw.read(self.name + ".scales").T))
        return coded(storage, width, packed, scales, zeros=self._zeros(scales.shape[0]), order=order)

    def _zeros(self, out: int) -> Array | None:
        """Return the zero points uint8 [out, groups]; None for symmetric weights, after a check."""
        if self.name + ".qzeros" not in self.raw:
            return None
        held = self.raw.read(self.name + ".qzeros")
        stored = unpack_codes(stream(held, self.bits, out), self.bits, out)
        if not self.symmetric:
            zeros = stored + np.uint8(self.subtracted) & np.uint8((1 << self.bits) - 1)
            return np.ascontiguousarray(zeros.T)
        middle = 1 << (self.bits - 1)
        if not ((stored == middle - 1).all() or (stored == middle).all()):
            raise self.raw.fault(self.name + ".qzeros", "has various zero points, though sym is true")
        return None
