"""The number formats that keys and values may be cached in, by the names of `kv_cache_dtype`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

KV_DTYPES: dict[str, np.dtype[Any]] = {
    "auto": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
