"""Matrices of 8-bit floats with scales, as FP8, compressed-tensors and ModelOpt checkpoints have them.

W = number * scale, in float32. Scales are for the tensor, for each output, for groups of inputs, or for
blocks of outputs and inputs, the last of which may be cut; those of blocks are repeated for each output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.kinds import Array
from quire.quantize.scales import ScaleForm, Scales
from quire.weights.formats.raw import SCALES, WEIGHT, QuantizedWeight, RawTensors, coded
from quire.weights.formats.settings import Settings

TABLES = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_SCALES = SCALES | {"F8_E8M0": "e8m0", "U8": "e8m0"}

_ENDINGS = tuple(f"_{end}" for end in ("scale_inv", "scale"))  # of the names of scales
BESIDE = ".scale"  # the name of scales beside .weight in DeepSeek-V4

Block = tuple[int, int]  # outputs, inputs that share a scale


def float8_weights(
    kind: str, raw: RawTensors, block: Block | None, config: Mapping[str, Any], single: bool
) -> Iterator[QuantizedWeight]:
    """Yield the weights in tensors of 8-bit floats, which all must have scales (see `float8_weight`)."""
    for name in raw:
        entry = raw.need(name)
        if entry.dtype in TABLES and not name.endswith(_ENDINGS):
            names = [*(name + end for end in _ENDINGS), name.removesuffix(WEIGHT) + BESIDE]
            scale = next((own for own in names if own in raw), None)
            if scale is None:
                raise raw.fault(name, "has 8-bit floats, but no scale")
            out = entry.shape[-2] if len(entry.shape) > 1 else 0
            rows = _joined_rows(name, raw.need(scale).shape, out, config)
            yield float8_weight(raw, kind, name, scale, block, rows, single=single)


def block_of(settings: Settings, *default: int) -> Block | None:
    """Return the shape of blocks that share a scale. Raises ConfigError."""
    value = settings.get("weight_block_size", default=list(default) or None)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise settings.fault("weight_block_size", value)
    return value[0], value[1]


def float8_weight(
    raw: RawTensors,
    kind: str,
    name: str,
    scale: str,
    block: Block | None,
    rows: tuple[int, ...] | None = None,
    *,
    single: bool,
) -> QuantizedWeight:
    """Return the weight in tensor `name` [..., out, in], with scales in the tensor `scale`.

    `block` is the shape of blocks, if config.json states one. `rows` are the outputs of matrices that were
    joined, each with a scale of its own. With `single` a matrix may have one scale: elsewhere that is what is
    left of others.
    """
    entry, scales = raw.need(name, *TABLES), raw.need(scale, *_SCALES)
    if len(entry.shape) < 2 or math.prod(entry.shape) == 0:
        raise raw.fault(name, f"has shape {list(entry.shape)}, which is no matrix")
    group, repeat = _layout(raw, entry.shape, scale, scales.shape, block, rows, single)
    width = entry.shape[-1]
    storage = CodedStorage(
        kind, 8, TABLES[entry.dtype], group if group < width else None, ScaleForm(_SCALES[scales.dtype])
    )

    def read() -> Coded:
        heights = entry.shape[-2] if repeat is None else len(repeat)
        values = raw.read(scale).reshape(*entry.shape[:-2], heights, -1)
        if repeat is not None:
            values = np.repeat(values, repeat, axis=-2)
        return coded(storage, width, raw.read(name), Scales(np.ascontiguousarray(values)))

    return raw.weight("", entry.shape, storage, (name, scale), read, name)


def _layout(
    raw: RawTensors,
    shape: tuple[int, ...],
    scale: str,
    found: tuple[int, ...],
    block: Block | None,
    rows: tuple[int, ...] | None,
    single: bool,
) -> tuple[int, Array | None]:
    """Return the inputs of a group, and how many outputs each row of scales is for, None if one.

    Raises ConfigError for scales that fit no layout.
    """
    *leading, out, width = shape
    if len(found) == len(shape) + 2 and found[-1] == found[-3] == 1:  # [out / 128, 1, in / 128, 1]
        found = (*found[:-4], found[-4], found[-2])
    if block is not None:
        height, group = min(block[0], out), min(block[1], width)
        count = -(-out // height)
        if found == (*leading, count, -(-width // group)):
            return group, np.diff([*range(0, out, height), out])
    if single and math.prod(found) == math.prod(leading) and found in _spellings(leading, 1):
        return width, np.array([out])
    if found in _spellings(leading, out):
        return width, None
    if rows is not None and found == (len(rows),) and sum(rows) == out:
        return width, np.array(rows)
    if found[:-1] == (*leading, out) and found[-1] and width % found[-1] == 0:
        return width // found[-1], None
    expected = "each output or groups of inputs"
    if block or single:
        expected = "blocks of {} x {}".format(*block) if block else f"the tensor, {expected}"
    raise raw.fault(scale, f"has shape {list(found)}, no scales for {expected} of {list(shape)}")


def _spellings(leading: list[int], count: int) -> set[tuple[int, ...]]:
    """Return the shapes of `count` scales of each matrix."""
    shapes = {(*leading, count), (*leading, count, 1)}
    return shapes | {tuple(leading), (*leading, 1, 1)} if count == 1 else shapes


def _joined_rows(
    name: str, scales: tuple[int, ...], out: int, config: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Return the outputs of the matrices joined in qkv_proj or gate_up_proj, which have a scale each."""
    if scales == (2,) and "gate_up_proj" in name:
        return out // 2, out - out // 2
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if scales == (3,) and "qkv_proj" in name and isinstance(heads, int) and isinstance(groups, int):
        unit = out // max(heads + 2 * groups, 1)
        return heads * unit, groups * unit, groups * unit
    return None
