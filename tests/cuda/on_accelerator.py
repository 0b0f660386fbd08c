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
from quire.models import Model, read_model
from quire.program import Program
from quire.quantize.kinds import Dense, StoredWeight

_WIDER = {
    "vocab_size": 35,  # a width need not be a multiple of anything
    "hidden_size": 64,
    "n_embd": 64,
    "head_dim": 16,
    "global_head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 9,  # shorter than the prompts of tests
    "attention_chunk_size": 9,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_latent_size": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "block_multiple_of": 16,
    "linear_value_head_dim": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_head_dim": 8,
}


def wide_config(name: str, **others: Any) -> dict[str, Any]:
    """Return the config of a tiny model in sizes that kernels for GPUs take: rows of multiples of 16."""
    return _widened(CONFIGS[name]) | others


def _widened(config: dict[str, Any]) -> dict[str, Any]:
    found = {key: _WIDER.get(key, value) for key, value in config.items()}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = _widened(value)
        elif key in ("short_factor", "long_factor"):
            found[key] = value * 4  # one for each pair of numbers of a head
        elif key == "mrope_section":
            found[key] = [4, 2, 2]
    return found


def wide(name: str, **others: Any) -> Model:
    return read_model(wide_config(name, **others))


CHECKPOINT = wide_config("qwen3", num_hidden_layers=1)


def write_checkpoint(folder: Path, config: Mapping[str, Any] = CHECKPOINT) -> str:
    """Write a checkpoint of a tiny model with random weights, by default of one layer; return the folder."""
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
    num_snapshots: int = 0,
    **_: Any,
) -> CudaBackend:
    """What Paged makes its backend with."""
    accelerator = InterpretedAccelerator()
    dtype = "float32" if kv_cache_dtype == "auto" else kv_cache_dtype
    capacity = Capacity(num_blocks, block_size, dtype, num_slots, num_snapshots)
    stored = {n: w if isinstance(w, StoredWeight) else Dense(w.array) for n, w in weights.items()}
    return CudaBackend(program, place_weights(program, stored, accelerator), accelerator, capacity)
