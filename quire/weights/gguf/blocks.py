"""The block types of GGUF as codes and scales, without loss: every number stays what its type says it is.

A tensor's rows are blocks of 32 or 256 weights, each with its own scales. `read_blocks` takes the integers
out of the blocks, in the order of the inputs, and the scales beside them; the arithmetic of the types is then
that of `Coded`. Sizes and layouts are those of gguf-py 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.quantize.coded import Coded, CodedStorage, Table, pack_codes
from quire.quantize.kinds import Array
from quire.quantize.round_to_nearest import Mapper
from quire.quantize.scales import ScaleForm, Scales

_F16 = np.dtype("<f2")
_PANEL_BYTES = 1 << 18  # of blocks, read together: their temporaries fit in the L2 cache


class _Parts(NamedTuple):
    """The content of some blocks: packed codes [n, bytes], scales [n, ...], perhaps minimums or zeros."""

    packed: Array
    values: Array
    codes: Array | None = None
    minimum_values: Array | None = None
    minimum_codes: Array | None = None
    zeros: Array | None = None

    def map(self, change: Callable[[Array], Array]) -> _Parts:
        """Apply a function to all arrays."""
        others = (None if part is None else change(part) for part in self[2:])
        return _Parts(change(self.packed), change(self.values), *others)


@dataclass(frozen=True, slots=True)
class Coding:
    """The codes of one type of blocks: their storage, and the function that reads them."""

    storage: CodedStorage
    read: Callable[[Array], _Parts]


def read_blocks(coding: Coding, blocks: Array, shape: tuple[int, ...], mapper: Mapper = map) -> Coded:
    """Read rows of blocks, uint8 [rows, bytes], as a weight of this shape.

    Rows are independent: the result does not depend on `mapper`.
    """
    storage, (rows, row_bytes) = coding.storage, blocks.shape
    block_bytes = row_bytes * block_weights(storage) // shape[-1]
    step = max(1, _PANEL_BYTES // row_bytes)
    one = coding.read(blocks[0, None, :block_bytes])
    whole = one.map(lambda part: np.empty((rows, row_bytes // block_bytes * part.size), part.dtype))

    def read(first: int) -> None:
        panel = blocks[first : first + step]
        for room, part in zip(whole, coding.read(panel.reshape(-1, block_bytes)), strict=True):
            if room is not None and part is not None:
                room[first : first + step] = part.reshape(len(panel), -1)

    for _ in mapper(read, range(0, rows, step)):
        pass
    found = whole.map(lambda array: array.reshape(*shape[:-1], -1))
    minimums = None
    if found.minimum_values is not None and storage.minimums is not None:
        minimums = _scales(found.minimum_values, found.minimum_codes, storage.minimums)
    return Coded(
        kind=storage.kind,
        packed=found.packed,
        bits=storage.bits,
        width=shape[-1],
        table=storage.table,
        group=storage.group,
        scales=_scales(found.values, found.codes, storage.scales),
        minimums=minimums,
        zeros=found.zeros,
    )


def _scales(values: Array, codes: Array | None, form: ScaleForm) -> Scales:
    return Scales(values) if codes is None else Scales(values, codes, form.together, form.code_bits)


def block_weights(storage: CodedStorage) -> int:
    """Return the weights of a block of this storage."""
    return (storage.group or 1) * storage.scales.together


def _half(blocks: Array, at: int) -> Array:
    """Return the float16 at byte `at` of each block, [n]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(_F16)[:, 0]


def _nibbles(blocks: Array, run: int) -> Array:
    """Pack nibbles [n, bytes]: in each run of bytes all low halves come first, then all high ones."""
    pairs = np.ascontiguousarray(blocks).view("<u2").reshape(len(blocks), -1, run // 2)
    packed = np.empty((len(blocks), pairs.shape[1], 2, run // 2), np.uint8)
    low, high = pairs & 0x0F0F, (pairs >> 4) & 0x0F0F
    packed[:, :, 0] = low | low >> 4  # the cast keeps the low byte
    packed[:, :, 1] = high | high >> 4
    return packed.reshape(len(blocks), -1)


def _low_nibbles(blocks: Array, run: int) -> Array:
    """Return the same unpacked, uint8 [n, weights]."""
    runs = blocks.reshape(len(blocks), -1, 1, run)
    return (np.concatenate((runs & 15, runs >> 4), axis=2)).reshape(len(blocks), -1)


def _quarters(blocks: Array) -> Array:
    """Return codes of 2 bits: bits 2k of byte j in 32 bytes are weight 32k + j."""
    runs = blocks.reshape(len(blocks), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (runs >> shifts & 3).reshape(len(blocks), -1)


def _bits(words: Array) -> Array:
    """Return the bits of words of 4 bytes [n, 4], the lowest first: uint8 [n, 32]."""
    return np.unpackbits(np.ascontiguousarray(words), axis=1, bitorder="little")


def _pack6(codes: Array) -> Array:
    """Pack codes of 6 bits, as `pack_codes` does, 16 at a time: four words become three."""
    words = codes.view("<u4").reshape(-1, 4)
    fours = words & 0x3F
    fours |= words >> 2 & 0xFC0
    fours |= words >> 4 & 0x3F000
    fours |= words >> 6 & 0xFC0000
    packed = np.empty((len(fours), 3), "<u4")
    packed[:, 0] = fours[:, 0] | fours[:, 1] << 24
    packed[:, 1] = fours[:, 1] >> 8 | fours[:, 2] << 16
    packed[:, 2] = fours[:, 2] >> 16 | fours[:, 3] << 8
    return packed.view(np.uint8).reshape(len(codes), -1)


def _q4_0(blocks: Array) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Array) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), minimum_values=_half(blocks, 2))


def _q5_0(blocks: Array) -> _Parts:
    codes = _low_nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _Parts(pack_codes(codes, 5), _half(blocks, 0))


def _q5_1(blocks: Array) -> _Parts:
    codes = _low_nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _Parts(pack_codes(codes, 5), _half(blocks, 0), minimum_values=_half(blocks, 2))


def _q8_0(blocks: Array) -> _Parts:
    return _Parts(np.ascontiguousarray(blocks[:, 2:]), _half(blocks, 0))


def _q2_k(blocks: Array) -> _Parts:
    codes, scales = _quarters(blocks[:, 16:80]), blocks[:, :16]
    return _Parts(pack_codes(codes, 2), _half(blocks, 80), scales & 15, -_half(blocks, 82), scales >> 4)


def _q3_k(blocks: Array) -> _Parts:
    low, high = _quarters(blocks[:, 32:96]), np.arange(8, dtype=np.uint8)[:, None]
    third = (blocks[:, None, :32] >> high & 1).reshape(len(blocks), -1)
    packed = pack_codes(low | third << 2, 3)
    upper = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = _low_nibbles(blocks[:, 96:104], 8) | upper << 4
    return _Parts(packed, _half(blocks, 108), scales.view(np.int8) - np.int8(32))


def _six_bit_scales(packed: Array) -> tuple[Array, Array]:
    """Return the scales and minimums of 8 groups, 6 bits each, from 12 bytes."""
    low, mins, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, rest & 15 | low >> 6 << 4), axis=1)
    return scales, np.concatenate((mins & 63, rest >> 4 | mins >> 6 << 4), axis=1)


def _q4_k(blocks: Array) -> _Parts:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    return _Parts(_nibbles(blocks[:, 16:], 32), _half(blocks, 0), scales, -_half(blocks, 2), minimums)


def _q5_k(blocks: Array) -> _Parts:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(blocks), -1)
    codes = _low_nibbles(blocks[:, 48:], 32) | fifth << 4
    return _Parts(pack_codes(codes, 5), _half(blocks, 0), scales, -_half(blocks, 2), minimums)


def _q6_k(blocks: Array) -> _Parts:
    low, high = np.ascontiguousarray(blocks[:, :128]), np.ascontiguousarray(blocks[:, 128:192])
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    codes[:, :, :2] = (low & 15).reshape(-1, 2, 2, 32)
    codes[:, :, 2:] = (low >> 4).reshape(-1, 2, 2, 32)
    for quarter in range(4):
        codes[:, :, quarter] |= (high << 4 - 2 * quarter if quarter < 2 else high >> 2 * quarter - 4).reshape(
            -1, 2, 32
        ) & 0x30
    return _Parts(
        _pack6(codes.reshape(len(blocks), -1)),
        _half(blocks, 208),
        np.ascontiguousarray(blocks[:, 192:208]).view(np.int8),
    )


def _iq4_nl(blocks: Array) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _iq4_xs(blocks: Array) -> _Parts:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = low.reshape(-1, 8) | high.astype(np.uint8) << 4
    return _Parts(_nibbles(blocks[:, 8:], 16), _half(blocks, 0), scales.view(np.int8) - np.int8(32))


def _mxfp4(blocks: Array) -> _Parts:
    packed = _nibbles(blocks[:, 1:], 16)
    packed[packed & 0x0F == 0x08] &= 0xF0  # code 8 means 0, not -0, in these files
    packed[packed & 0xF0 == 0x80] &= 0x0F
    return _Parts(packed, np.ascontiguousarray(blocks[:, 0]))


def _tq1_0(blocks: Array) -> _Parts:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    trits = [
        blocks[:, None, :32] * powers,
        blocks[:, None, 32:48] * powers,
        blocks[:, None, 48:52] * powers[:4],
    ]
    flat = np.concatenate([part.reshape(len(blocks), -1) for part in trits], axis=1)
    codes = (flat.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return _ternary(codes, _half(blocks, 52))


def _tq2_0(blocks: Array) -> _Parts:
    return _ternary(_quarters(blocks[:, :64]), _half(blocks, 64))


def _ternary(codes: Array, values: Array) -> _Parts:
    """Return the parts of codes that mean one less."""
    return _Parts(pack_codes(codes, 2), values, zeros=np.ones(len(codes), np.uint8))


_HALF = ScaleForm("f16")


def _coding(
    kind: str,
    bits: int,
    table: Table,
    group: int,
    read: Callable[[Array], _Parts],
    scales: ScaleForm = _HALF,
    minimums: ScaleForm | None = None,
    zeros: bool = False,
) -> Coding:
    return Coding(CodedStorage(kind, bits, table, group, scales, minimums, zeros), read)


_K6, _K2 = ScaleForm("f16", "u8", 6, 8), ScaleForm("f16", "u8", 4, 16)

# Types whose weights are codes. F32, F16 and BF16 are floats; the others are not supported.
CODINGS = {
    "Q4_0": _coding("q4_0", 4, "offset", 32, _q4_0),
    "Q4_1": _coding("q4_1", 4, "unsigned", 32, _q4_1, minimums=_HALF),
    "Q5_0": _coding("q5_0", 5, "offset", 32, _q5_0),
    "Q5_1": _coding("q5_1", 5, "unsigned", 32, _q5_1, minimums=_HALF),
    "Q8_0": _coding("q8_0", 8, "signed", 32, _q8_0),
    "Q2_K": _coding("q2_k", 2, "unsigned", 16, _q2_k, _K2, _K2),
    "Q3_K": _coding("q3_k", 3, "offset", 16, _q3_k, ScaleForm("f16", "i8", 6, 16)),
    "Q4_K": _coding("q4_k", 4, "unsigned", 32, _q4_k, _K6, _K6),
    "Q5_K": _coding("q5_k", 5, "unsigned", 32, _q5_k, _K6, _K6),
    "Q6_K": _coding("q6_k", 6, "offset", 16, _q6_k, ScaleForm("f16", "i8", 8, 16)),
    "IQ4_NL": _coding("iq4_nl", 4, "iq4nl", 32, _iq4_nl),
    "IQ4_XS": _coding("iq4_xs", 4, "iq4nl", 32, _iq4_xs, ScaleForm("f16", "i8", 6, 8)),
    "MXFP4": _coding("mxfp4", 4, "fp4", 32, _mxfp4, ScaleForm("e8m0")),
    "TQ1_0": _coding("tq1_0", 2, "unsigned", 256, _tq1_0, zeros=True),
    "TQ2_0": _coding("tq2_0", 2, "unsigned", 256, _tq2_0, zeros=True),
}
