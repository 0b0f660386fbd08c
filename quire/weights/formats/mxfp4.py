"""MXFP4 as gpt-oss is published: the experts of a layer in one tensor, everything else in bfloat16.

gate_up_proj_blocks  u8 [experts, 2 * inner, hidden / 32, 16]    gate and up in turns
gate_up_proj_scales  u8 [experts, 2 * inner, hidden / 32]
down_proj_blocks     u8 [experts, hidden, inner / 32, 16], and its scales
"""

from __future__ import annotations

from quire.weights.formats.fp4 import mxfp4_weight
from quire.weights.formats.raw import RawTensors, Reading
from quire.weights.formats.settings import Settings

_BLOCKS, _SCALES = "_blocks", "_scales"


def read_mxfp4(settings: Settings, raw: RawTensors) -> Reading:
    """Read every pair of blocks and scales, under the name that a checkpoint of floats has for it."""
    names = raw.modules(_BLOCKS)
    return Reading("MXFP4", tuple(mxfp4_weight(raw, n, n + _BLOCKS, n + _SCALES) for n in names))
