"""Writes a safetensors file tensor by tensor: shapes first, data in any order, one tensor in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.quantize.kinds import Array

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

Entries = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (number format, shape)


def data_bytes(entries: Entries) -> int:
    """Return the bytes of the data of these tensors."""
    return sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in entries.values())


class SafetensorsWriter:
    """A file of known tensors: `write` each once, then `close`, which raises ValueError if one is missing."""

    def __init__(self, path: Path, entries: Entries, metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        # Wide numbers first, so that every tensor is aligned to its numbers.
        for name in sorted(entries, key=lambda name: (-DTYPES[entries[name][0]].itemsize, name)):
            dtype, shape = entries[name]
            start, end = end, end + DTYPES[dtype].itemsize * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header, self._missing = header, set(entries)
        self._start = 8 + len(text)
        self._file = open(path, "xb")  # noqa: SIM115  closed by close
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, array: Array) -> None:
        """Write the data of one tensor, which must have the announced number format and shape."""
        entry = self._header[name]
        if array.dtype != DTYPES[entry["dtype"]] or list(array.shape) != entry["shape"]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, announced as {entry}")
        self._missing.remove(name)
        self._file.seek(self._start + entry["data_offsets"][0])
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def close(self, complete: bool = True) -> None:
        """Close the file; with `complete`, only after all of it has reached the disk."""
        try:
            if complete and self._missing:
                raise ValueError(f"not written: {', '.join(sorted(self._missing))}")
            if complete:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
