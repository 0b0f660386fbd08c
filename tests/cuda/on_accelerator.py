"""Programs on the cuda backend and the interpreted accelerator, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.backends.backend import Capacity
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.weights import place_weights
from quire.program import Program
from quire.quantize.kinds import Dense, StoredWeight


def interpreted(
    program: Program,
    weights: Mapping[str, Any],
    *,
    num_blocks: list[int],
    block_size: int,
    kv_cache_dtype: str = "auto",
    num_slots: int = 8,
    **_: Any,
) -> CudaBackend:
    """What Paged makes its backend with."""
    accelerator = InterpretedAccelerator()
    dtype = "float32" if kv_cache_dtype == "auto" else kv_cache_dtype
    capacity = Capacity(num_blocks, block_size, dtype, num_slots)
    stored = {n: w if isinstance(w, StoredWeight) else Dense(w.array) for n, w in weights.items()}
    return CudaBackend(program, place_weights(program, stored, accelerator), accelerator, capacity)
