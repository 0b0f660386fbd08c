"""The keys of families of 2025 and 2026, as quire.models.defaults has them."""

from __future__ import annotations

from quire.models.defaults import GLM4_MOE, LFM2, LLAMA, PLAIN, Defaults
from quire.models.defaults_mamba import MAMBA

_OF_LFM2 = ("block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "full_attn_idxs")
LFM3: Defaults = {
    **{key: value for key, value in LFM2.items() if key not in _OF_LFM2},
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "attention_bias": False,
}
HY_V3: Defaults = {
    **LLAMA,
    "vocab_size": 120832,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "mlp_layer_types": None,
}
DOTS1: Defaults = {
    **PLAIN,
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "layer_types": None,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "num_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
}
SOLAR_OPEN: Defaults = {
    **{
        key: value
        for key, value in GLM4_MOE.items()
        if key not in ("intermediate_size", "use_qk_norm", "first_k_dense_replace", "partial_rotary_factor")
    },
    "vocab_size": 196608,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "moe_intermediate_size": 1280,
}
EXAONE_MOE: Defaults = {
    **PLAIN,
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
}
COHERE2_MOE: Defaults = {
    **PLAIN,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "root_mean_square_eps": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": 0,
    "prefix_dense_sliding_window_pattern": 1,
    "prefix_dense_intermediate_size": None,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
}
MIMO_V2: Defaults = {
    **{
        key: value
        for key, value in GLM4_MOE.items()
        if key not in ("n_shared_experts", "use_qk_norm", "first_k_dense_replace", "partial_rotary_factor")
    },
    "vocab_size": 152576,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "num_experts": 256,
    "moe_intermediate_size": 2048,
    "sliding_window": 129,
    "sliding_window_size": None,
    "layer_types": None,
    "mlp_layer_types": None,
    "attention_value_scale": 0.707,
}
BAMBA: Defaults = {
    **LLAMA,
    **MAMBA,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attn_layer_indices": None,
}
