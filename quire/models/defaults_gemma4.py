"""The keys that Gemma 4 and Gemma 3n read from config.json, as quire.models.defaults."""

from __future__ import annotations

from quire.models.defaults import GEMMA3, Defaults

_NOT_READ = (
    *(
        "query_pre_attn_scalar",
        "sliding_window_pattern",
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
    ),
    *("original_max_position_embeddings", "use_bidirectional_attention"),
)
HEADS_BY_TYPE = "heads by layer type"  # of per_layer_config: as global_head_dim and so on say
_GEMMA4: Defaults = {
    **{key: value for key, value in GEMMA3.items() if key not in _NOT_READ},
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": HEADS_BY_TYPE,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
GEMMA4: Defaults = {
    **_GEMMA4,
    "sliding_window": 512,
    "pad_token_id": 0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
GEMMA4_UNIFIED: Defaults = {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144}
_NOT_IN_3N = (
    *("query_pre_attn_scalar", "sliding_window_pattern", "original_max_position_embeddings"),
    *("intermediate_size", "use_bidirectional_attention"),
)
GEMMA3N: Defaults = {
    **{key: value for key, value in GEMMA3.items() if key not in _NOT_IN_3N},
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_sizes": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
