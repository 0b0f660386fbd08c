"""Writes GGUF files for tests, right ones and wrong ones: the format as its specification has it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """A value with its type, by Python's: bool, int (u32; negative or in a list i32), float, str, lists."""
    if isinstance(value, list):
        kind, *_ = {kind_of(item) for item in value} - {4} or {5}
        items = b"".join(text(v) if kind == 8 else struct.pack(_FORMATS[kind], v) for v in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind = kind_of(value)
    return struct.pack("<I", kind) + (text(value) if kind == 8 else struct.pack(_FORMATS[kind], value))


def kind_of(value: Any) -> int:
    for python, kind in ((bool, 7), (str, 8), (bytes, 8), (float, 6)):
        if isinstance(value, python):
            return kind
    return 5 if value < 0 else 4


def pair(key: str | bytes, value: Any) -> bytes:
    """A pair; `value` as bytes is written as it is, type and all."""
    return text(key) + (value if isinstance(value, bytes) else typed(value))


def header(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """The header of a tensor; `dims` as the file has them, the inputs first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def whole(
    pairs: list[bytes], headers: list[bytes], data: bytes = b"", version: int = 3, alignment: int = 32
) -> bytes:
    """A file of parts."""
    start = b"GGUF" + struct.pack("<IQQ", version, len(headers), len(pairs))
    head = start + b"".join(pairs) + b"".join(headers)
    return head + bytes(-len(head) % alignment) + data


def encoded(array: np.ndarray, kind: int) -> bytes:
    """The bytes of an array in a type."""
    if kind == Q8_0:
        groups = array.astype(np.float32).reshape(-1, 32)
        scales = (np.abs(groups).max(axis=1) / 127).astype("<f2")
        inverse = np.divide(1, scales.astype(np.float32), where=scales > 0, out=np.zeros(len(scales), "<f4"))
        codes = np.clip(np.rint(groups * inverse[:, None]), -127, 127).astype(np.int8)
        return np.concatenate((scales[:, None].view(np.uint8), codes.view(np.uint8)), axis=1).tobytes()
    return array.astype({F32: "<f4", F16: "<f2", BF16: ml_dtypes.bfloat16}[kind]).tobytes()


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, int]]) -> Path:
    """Write a file: tensors by name, each an array in NumPy's order and its type."""
    headers, data = [], b""
    for name, (array, kind) in tensors.items():
        headers.append(header(name, array.shape[::-1], kind, len(data)))
        data += encoded(array, kind)
        data += bytes(-len(data) % 32)
    path.write_bytes(whole([pair(key, value) for key, value in metadata.items()], headers, data))
    return path
