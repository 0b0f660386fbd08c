"""Programs on the cuda backend and the interpreted accelerator, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tiny import random_weights
from widened import wide as wide
from widened import wide_config as wide_config

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.divided import divide, divided_axes
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.weights import place_weights
from quire.models import read_model
from quire.program import Program
from quire.quantize.kinds import DTYPES, Dense, StoredWeight

# Families that the cuda backend refuses, and how it does
REFUSED = {
    "kimi_linear": "delta rules with a decay for each channel",
    "olmo_hybrid": "delta rules with separate inputs or negative eigenvalues",
    "deepseek_v32": "attention to positions that an indexer chooses",
    "glm_moe_dsa": "attention to positions that an indexer chooses",
    "deepseek_v4": "hyper-connections",
}
CHECKPOINT = wide_config("qwen3", num_hidden_layers=1)


def write_checkpoint(folder: Path, config: Mapping[str, Any] = CHECKPOINT, format: str = "f32") -> str:
    """Write a checkpoint of a tiny model with random weights, by default of one layer; return the folder."""
    weights = random_weights(read_model(config).program)
    arrays = {name: weight.array.astype(DTYPES[format]) for name, weight in weights.items()}
    save_file(arrays, folder / "model.safetensors")
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
    num_snapshots: int = 0,
    make: Callable[[], Accelerator] = InterpretedAccelerator,
    **_: Any,
) -> CudaBackend:
    """What Paged makes its backend with, on the accelerator that `make` returns."""
    accelerator = make()
    axes = divided_axes(program, accelerator.num_ranks)
    program = divide(program, accelerator.num_ranks, axes)
    dtype = "float32" if kv_cache_dtype == "auto" else kv_cache_dtype
    capacity = Capacity(num_blocks, block_size, dtype, num_slots, num_snapshots)
    stored = {n: w if isinstance(w, StoredWeight) else Dense(w.array) for n, w in weights.items()}
    return CudaBackend(program, place_weights(program, stored, accelerator, axes), accelerator, capacity)
