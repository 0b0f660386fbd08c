"""Scratch memory: arrays that live from one launch of an op to another, with a row for each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import ALIGNMENT, DeviceArray

Part = tuple[int, np.dtype[Any]]  # of an array: the numbers of a row, and their type


def carve(memory: DeviceArray, rows: int, parts: Iterable[Part]) -> tuple[DeviceArray, ...]:
    """Return an array [rows, width] for each part, one after the other from the start of the memory on."""
    found, first = list[DeviceArray](), 0
    for width, dtype in parts:
        found.append(memory.part(first, (rows, width), dtype))
        first += rows * row_bytes([(width, dtype)])
    return tuple(found)


def row_bytes(parts: Iterable[Part]) -> int:
    """Return the bytes that the parts take for each row."""
    return sum(-(-width * dtype.itemsize // ALIGNMENT) * ALIGNMENT for width, dtype in parts)
