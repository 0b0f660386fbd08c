"""The keys that hybrids of attention and Mamba-2 read from config.json, as quire.models.defaults."""

from __future__ import annotations

import math

from quire.models.defaults import GRANITE, LLAMA, Defaults

MAMBA: Defaults = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, math.inf],
}
GRANITE4: Defaults = {
    **{key: value for key, value in GRANITE.items() if key != "mlp_bias"},
    **MAMBA,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layer_types": None,
}
FALCON_H1: Defaults = {
    **LLAMA,
    **MAMBA,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "mlp_multipliers": None,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
NEMOTRON_H: Defaults = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "intermediate_size": 21504,
    "hidden_act": "relu2",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "use_bias": False,
    "num_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
