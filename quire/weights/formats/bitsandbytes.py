"""bitsandbytes: 4 bits by a table (nf4 and fp4), and 8 bits by output.

4 bits, with blocks of the flat matrix, which need not end where rows do:

    weight                     u8 [out * in / 2, 1], the first of two in the high half
    weight.absmax              f32 [blocks]; or u8, with nested_absmax f32 and nested_quant_map f32 [256]
    weight.quant_map           f32 [16]
    weight.quant_state.*       JSON: shape, blocksize, nested_blocksize, nested_offset

W = quant_map[q] * absmax, where absmax = nested_quant_map[code] * nested_absmax + nested_offset if nested.

8 bits: weight i8 [out, in] and SCB f32 [out], W = q * (SCB / 127).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from quire.json_file import check_size, parse_object
from quire.quantize.coded import Coded, CodedStorage, pack_codes
from quire.quantize.kinds import Floats
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.raw import BETTER, QuantizedWeight, RawTensors, Reading, coded
from quire.weights.formats.settings import Settings

_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_STATE_LIMIT_BYTES, _STATE_VALUES = 1 << 16, 256
_SMALLEST_GROUP = 4  # that is computed with


def read_bitsandbytes(settings: Settings, raw: RawTensors) -> Reading:
    """Read every weight with a quantization state, and every one with SCB."""
    unused = frozenset(name for name in raw if name.endswith(".weight_format"))
    return Reading("bitsandbytes", (*_four_bits(raw), *_eight_bits(raw)), (), unused)


def _four_bits(raw: RawTensors) -> Iterator[QuantizedWeight]:
    for kind in _TYPES:
        for name in raw.modules(_STATE + kind):
            yield _Table(raw, name, _STATE + kind, kind).weight()


class _Table:
    """A matrix of 4-bit codes with a table of floats, from headers and its quantization state."""

    def __init__(self, raw: RawTensors, name: str, state: str, kind: str) -> None:
        self.raw, self.name, self.kind, self.state = raw, name, kind, name + state
        entry = raw.need(self.state, "U8", dims=1)
        if entry.nbytes > _STATE_LIMIT_BYTES:
            raise raw.fault(self.state, f"has {entry.nbytes:,} bytes")
        text, where = raw.read(self.state).tobytes(), f"{raw.where}: {self.state}"
        check_size(text, where, _STATE_VALUES)
        stated = Settings(parse_object(text, where), self.state)
        self.shape = self._shape(stated)
        self.block = stated.integer("blocksize", low=16)
        self.nested = stated.integer("nested_blocksize", default=256)
        self.offset = stated.get("nested_offset", default=0.0)
        self.group = math.gcd(self.block, self.shape[1])
        if self.group < min(_SMALLEST_GROUP, self.shape[1]):
            what = f"has blocks of {self.block} in rows of {self.shape[1]} inputs, which is not supported"
            raise raw.fault(name, what, BETTER)
        blocks = -(-math.prod(self.shape) // self.block)
        held = raw.need(name)
        if held.nbytes * 2 != math.prod(self.shape):
            raise raw.fault(name, f"has {held.nbytes:,} bytes, not those of {list(self.shape)} in 4 bits")
        self.parts = [name, self.state, name + ".absmax", name + ".quant_map"]
        raw.need(name + ".quant_map", "F32")
        raw.need_shape(name + ".quant_map", (16,))
        raw.need_shape(name + ".absmax", (blocks,))
        if raw.need(name + ".absmax", "F32", "U8").dtype == "U8":
            self.parts += [name + ".nested_absmax", name + ".nested_quant_map"]
            for part, count in zip(self.parts[-2:], (-(-blocks // self.nested), 256), strict=True):
                raw.need(part, "F32")
                raw.need_shape(part, (count,))

    def weight(self) -> QuantizedWeight:
        table = tuple(map(float, self.raw.read(self.name + ".quant_map")))
        if not np.isfinite(table).all():
            raise self.raw.fault(self.name + ".quant_map", "has numbers that are not finite")
        group = self.group if self.group < self.shape[1] else None
        storage = CodedStorage(f"bitsandbytes {self.kind}", 4, table, group, ScaleForm("f32"))
        return self.raw.weight(
            "", self.shape, storage, tuple(self.parts), lambda: self._read(storage), self.name
        )

    def _read(self, storage: CodedStorage) -> Coded:
        out, width = self.shape
        held = self.raw.read(self.name).reshape(-1).view(np.uint8)
        packed = (held >> 4 | held << 4).astype(np.uint8)
        if width % 2:  # rows begin in the middle of a byte
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(out, width)
            packed = pack_codes(codes, 4)
        first = np.arange(0, out * width, self.group)
        scales = self._absmax()[first // self.block].reshape(out, -1)
        return coded(storage, width, packed.reshape(out, -1), Scales(np.ascontiguousarray(scales)))

    def _absmax(self) -> Floats:
        held = self.raw.read(self.name + ".absmax")
        if held.dtype != np.uint8:
            return held
        table, scales = (self.raw.read(part) for part in (self.parts[-1], self.parts[-2]))
        return table[held] * np.repeat(scales, self.nested)[: len(held)] + np.float32(self.offset)

    def _shape(self, stated: Settings) -> tuple[int, int]:
        shape = stated.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(n) is int and 0 < n < 1 << 31 for n in shape)
        ):
            raise self.raw.fault(self.state, "states no shape of a matrix")
        return shape[0], shape[1]


def _eight_bits(raw: RawTensors) -> Iterator[QuantizedWeight]:
    for module in raw.modules(".SCB"):
        name, scale = module + ".weight", module + ".SCB"
        out, width = raw.need(name, "I8", dims=2).shape
        raw.need(scale, "F32")
        raw.need_shape(scale, (out,), (out, 1))
        layout = module + ".weight_format"
        if layout in raw and raw.read(layout).any():
            raise raw.fault(layout, "names a layout of GPUs: only rows (0) are supported")
        storage = CodedStorage("bitsandbytes int8", 8, "signed", None, ScaleForm("f32"))

        read = partial(_read_bytes, raw, storage, name, scale)
        yield raw.weight("", (out, width), storage, (name, scale), read, name)


def _read_bytes(raw: RawTensors, storage: CodedStorage, name: str, scale: str) -> Coded:
    codes, scales = raw.read(name).view(np.uint8), raw.read(scale).reshape(-1, 1) / np.float32(127)
    return coded(storage, codes.shape[1], codes, Scales(scales))
