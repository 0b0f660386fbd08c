"""Integers of 2 to 8 bits in 32-bit words, as the formats pack them.

The usual packing is a little-endian stream of bits along one axis, as `pack_codes` has it in bytes: so words
become bytes, and no value is touched.
"""

from __future__ import annotations

import numpy as np

from quire.quantize.kinds import Array

_TOGETHER = 1 << 16  # words of a step: they stay in the cache
_PERIOD = 32  # codes that fill whole words, whatever their bits


def stream(words: Array, bits: int, width: int) -> Array:
    """Return the bytes of streams of 32-bit words [..., n], uint8 [..., ceil(width * bits / 8)]."""
    held = np.ascontiguousarray(words).view(np.uint8)
    return held[..., : -(-width * bits // 8)]


def padded_words(words: Array, bits: int, width: int) -> Array:
    """Return the integers in 32-bit words [..., n] of 32 // bits whole values each, uint8 [..., width]."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    values = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.reshape(*words.shape[:-1], -1)[..., :width].astype(np.uint8)


def in_order(words: Array, bits: int, order: Array) -> Array:
    """Return words [n, out], streams along the first axis, with the codes in another order.

    The code of input order[0] comes first. Rows of words stay whole, and are few enough to stay in the cache.
    """
    held, mask = np.ascontiguousarray(words).view(np.uint32), np.uint32((1 << bits) - 1)
    out = held.shape[1]
    step = _PERIOD * max(1, _TOGETHER // max(out, 1))
    parts = []
    for first in range(0, len(order), step):
        chosen = order[first : first + step]
        part = np.zeros((-(-len(chosen) // _PERIOD), bits, out), np.uint32)  # words of 32 codes
        for k in range(min(_PERIOD, len(chosen))):
            codes = _rows_of(held, bits, chosen[k::_PERIOD]) & mask
            to, shift = divmod(k * bits, 32)
            part[: len(codes), to] |= codes << np.uint32(shift)
            if shift + bits > 32:
                part[: len(codes), to + 1] |= codes >> np.uint32(32 - shift)
        parts.append(part.reshape(-1, out))
    return np.concatenate(parts)[: len(words)]


def _rows_of(words: Array, bits: int, inputs: Array) -> Array:
    """Return the codes of inputs [n], in the low bits of uint32 [n, out]."""
    rows, shifts = np.divmod(inputs.astype(np.int64) * bits, 32)
    codes = words[rows] >> shifts.astype(np.uint32)[:, None]
    if 32 % bits and (cut := np.flatnonzero(shifts + bits > 32)).size:
        codes[cut] |= words[rows[cut] + 1] << (32 - shifts[cut]).astype(np.uint32)[:, None]
    return codes


def group_order(index: Array, group: int) -> Array | None:
    """Return the inputs sorted by the group of each [in], int32; None if they are in this order already.

    Raises ValueError unless each group has `group` inputs, and the last the rest.
    """
    groups = np.arange(len(index)) // group
    if np.array_equal(index, groups):
        return None
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], groups):
        raise ValueError(f"does not give each group {group} inputs")
    return order.astype(np.int32)
