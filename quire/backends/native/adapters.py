"""Adapters in the native core: their matrices, packed in one memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.backends.native import _core
from quire.program.program import LowRank
from quire.quantize.kinds import DTYPE_NAMES, Array, to_float32


def pack_adapter(parts: Mapping[str, LowRank], sites: Mapping[str, int], isa: str) -> _core.Adapter:
    """Pack the matrices of an adapter as they are stored; `sites` are the places of weights in the program.

    Where the two of a product have different formats, they become float32.
    """
    found = {sites[name]: _alike(parts[name]) for name in sites if name in parts}  # in order of their use
    shapes = [
        (site, DTYPE_NAMES[down.dtype], *down.shape, len(up), scale)
        for site, (down, up, scale) in found.items()
    ]
    adapter = _core.Adapter(len(sites), shapes)
    for site, (down, up, _) in found.items():
        for matrix, array in ((adapter.down(site), down), (adapter.up(site), up)):
            bits = array if array.dtype == np.float32 else array.view(np.uint16)
            panels = -(-len(array) // _core.PANEL)
            _core.pack(matrix, 0, bits, DTYPE_NAMES[array.dtype], [], isa, 0, panels)
    return adapter


def _alike(part: LowRank) -> tuple[Array, Array, float]:
    if part.down.dtype == part.up.dtype:
        return part.down, part.up, part.scale
    return to_float32(part.down), to_float32(part.up), part.scale
