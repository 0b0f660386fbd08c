"""Programs on the cuda backend and the interpreted accelerator, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights

from quire.backends.backend import Capacity
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.weights import place_weights
from quire.models import read_model
from quire.program import Program
from quire.quantize.kinds import Dense, StoredWeight


def write_checkpoint(folder: Path) -> str:
    """Write a checkpoint of a tiny model with random weights; return the folder."""
    config = CONFIGS["qwen3"]
    weights = random_weights(read_model(config).program)
    save_file({name: weight.array for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


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
