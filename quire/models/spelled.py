"""The names that families have for common keys of config.json, and older ones, as Family has them."""

from __future__ import annotations

GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
EXAONE = {
    "num_hidden_layers": "num_layers",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT_NEO = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    "sliding_window": "window_size",
}
FALCON = {
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "activation",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT_NEOX = {
    "rms_norm_eps": "layer_norm_eps",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}
NEMOTRON = {
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "num_experts": "n_routed_experts",
}
NEMOTRON_OLDER = {
    "layers_block_type": "layer_types",
    "num_experts": "num_local_experts",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}
