"""Writes small quantized checkpoints, in plain Python: an independent definition of each packing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.weights.folder import ModelFolder
from quire.weights.tensors import Tensors

_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int64): "I64",
}


def write(folder: Path, stated: object, tensors: Mapping[str, np.ndarray], **config: Any) -> Tensors:
    """Write a checkpoint and open its tensors; `stated` is quantization_config, None for no such key."""
    header, data = {}, b""
    for name, array in tensors.items():
        held = np.ascontiguousarray(array).tobytes()
        shape, offsets = list(array.shape), [len(data), len(data) + len(held)]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": shape, "data_offsets": offsets}
        data += held
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config |= {} if stated is None else {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFolder.at(folder).tensors()


def stream(values: np.ndarray, bits: int, dtype: Any = np.int32) -> np.ndarray:
    """Pack integers along the last axis into words: value k has the bits from bits * k on."""
    words = []
    for row in values.reshape(-1, values.shape[-1]).tolist():
        number = sum(value << (bits * k) for k, value in enumerate(row))
        length = -(-len(row) * bits // 32)
        words.append([number >> (32 * w) & 0xFFFFFFFF for w in range(length)])
    return np.array(words, np.uint32).reshape(*values.shape[:-1], -1).view(dtype)


def padded(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers along the last axis into words of 32 // bits each."""
    each = 32 // bits
    words = [
        [
            sum(value << (bits * k) for k, value in enumerate(row[first : first + each]))
            for first in range(0, len(row), each)
        ]
        for row in values.tolist()
    ]
    return np.array(words, np.uint32).view(np.int32)


def by_input(of_groups: np.ndarray, group: int, width: int) -> np.ndarray:
    return np.repeat(of_groups, group, axis=-1)[..., :width]


def gptq(
    q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, less: int = 1
) -> dict[str, np.ndarray]:
    """The tensors of module "m" from integers [out, in], zero points and scales [out, groups]."""
    stored = (zeros - less) % (1 << bits)
    return {
        "m.qweight": np.ascontiguousarray(stream(q, bits).T),
        "m.qzeros": stream(np.ascontiguousarray(stored.T), bits),
        "m.scales": np.ascontiguousarray(scales.T.astype(np.float16)),
    }
