"""The number formats of cached keys and values, by the names of `kv_cache_dtype`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# Array types of the reference backend.
KV_DTYPES: dict[str, np.dtype[Any]] = {
    "auto": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Bytes of one number, and of the scale shared by a token's numbers of one head, of keys or of values.
KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KV_SCALE_BYTES = {"int8": 4}

# The own format of a model in these numbers.
OWN_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
