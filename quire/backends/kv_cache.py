"""The number formats that keys and values may be cached in, by the names of `kv_cache_dtype`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.program.program import Program

# What the reference backend keeps, as arrays.
KV_DTYPES: dict[str, np.dtype[Any]] = {
    "auto": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Bytes of one number; and of the scale that a token's numbers of one head share, for keys and for values.
KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KV_SCALE_BYTES = {"int8": 4}

_OWN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def is_native(config: EngineConfig) -> bool:
    """Whether the native backend computes: asked for, or nothing else was."""
    return config.device in ("auto", "native")


def kv_dtype(config: EngineConfig, stored: str) -> str:
    """The format of cached keys and values, never "auto"; `stored` is that of the weights: bf16, f16, f32.

    "auto" is the format that the model was made in; of the reference, which is there to be exact, float32.
    Raises ConfigError for what the backend does not have.
    """
    if config.kv_cache_dtype == "int8" and config.device == "reference":
        raise ConfigError(
            "kv_cache_dtype = 'int8' is not there on the reference backend",
            "choose 'float32', 'float16' or 'bfloat16', or device = 'native'",
        )
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return _OWN[stored] if is_native(config) else "float32"


def kv_token_bytes(program: Program, dtype: str) -> int:
    """Bytes of cache that one token takes over all layers, in a format that `kv_dtype` gave."""
    item, scale = KV_ITEM_BYTES[dtype], KV_SCALE_BYTES.get(dtype, 0)
    return program.kv_token_bytes(item, scale)
