"""Number formats of values and states."""

from __future__ import annotations

from typing import Literal

DType = Literal["float32", "float16", "bfloat16", "int32"]
ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}
