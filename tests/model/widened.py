"""Tiny models in sizes that kernels for GPUs take: rows of multiples of 16."""

from __future__ import annotations

from typing import Any

from tiny import CONFIGS

from quire.models import Model, read_model

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
    "index_head_dim": 32,
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
    """Return the config of a tiny model in these sizes."""
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
        elif isinstance(value, list) and key in _WIDER:  # of each kind of experts
            found[key] = [_WIDER[key]] * len(value)
    return found


def wide(name: str, **others: Any) -> Model:
    return read_model(wide_config(name, **others))
