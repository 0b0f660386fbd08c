"""The number formats that keys and values may be cached in, by the names of `kv_cache_dtype`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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

# The format that a model of these numbers was made in.
OWN_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
