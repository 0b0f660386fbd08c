"""The keys of families that differ from others in a few lines, as quire.models.defaults has them."""

from __future__ import annotations

from quire.models.defaults import COHERE2, GRANITE, LLAMA, MISTRAL, OLMOE, PLAIN, Defaults

_NO_OLDER_ROPE = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
MELLUM: Defaults = {
    **{key: value for key, value in PLAIN.items() if key not in _NO_OLDER_ROPE},
    "vocab_size": 98304,
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "sliding_window": 1024,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": 896,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": True,
}
ARCEE: Defaults = {
    **LLAMA,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
BITNET: Defaults = {
    **PLAIN,
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "attention_bias": False,
}
CWM: Defaults = {
    **PLAIN,
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "mlp_bias": False,
    "sliding_window": 8192,
    "layer_types": None,
}
GRANITE_MOE: Defaults = {
    **{key: value for key, value in GRANITE.items() if key != "mlp_bias"},
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GRANITE_MOE_SHARED: Defaults = {**GRANITE_MOE, "shared_intermediate_size": 0}
_WINDOWS: Defaults = {"sliding_window": 128, "layer_types": None, "layer_rope_theta": None}
GRANITE_SWA: Defaults = {
    **GRANITE,
    **_WINDOWS,
    "vocab_size": 100352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GRANITE_MOE_SWA: Defaults = {**GRANITE_MOE_SHARED, **_WINDOWS}
HYPERCLOVAX: Defaults = {**GRANITE, "attention_multiplier": None, "use_post_norm": True}
JAIS2: Defaults = {
    **LLAMA,
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_attention_heads": 26,
    "hidden_act": "relu2",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
}
HELIUM: Defaults = {
    **PLAIN,
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
MINISTRAL: Defaults = {**MISTRAL, "layer_types": None}
AFMOE: Defaults = {
    **PLAIN,
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "layer_types": None,
    "num_dense_layers": 1,
    "moe_intermediate_size": 1408,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
    "mup_enabled": False,
}
OLMO: Defaults = {
    **{key: value for key, value in PLAIN.items() if key != "rms_norm_eps"},
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
}
_COHERE2_ONLY = ("sliding_window", "sliding_window_pattern", "layer_types")
COHERE: Defaults = {
    **{key: value for key, value in COHERE2.items() if key not in _COHERE2_ONLY},
    "rope_theta": 500_000.0,
    "use_qk_norm": False,
}
PHI: Defaults = {
    **PLAIN,
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": False,
}
NEMOTRON: Defaults = {
    **LLAMA,
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
GPT_NEOX: Defaults = {
    **{key: value for key, value in PLAIN.items() if key not in ("head_dim", "num_key_value_heads")},
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "attention_bias": True,
    "use_parallel_residual": True,
}
# Of the code that is published with the checkpoints, which state all of it; transformers has no classes.
BAILING: Defaults = {
    **PLAIN,
    "vocab_size": 126464,
    "intermediate_size": 5632,
    "max_position_embeddings": 16384,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "num_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "moe_shared_expert_intermediate_size": None,
}
BAILING2: Defaults = {
    **BAILING,
    "vocab_size": 157184,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
}
DECI: Defaults = {**LLAMA, "block_configs": None}
EXAONE: Defaults = {
    **PLAIN,
    "vocab_size": 102400,
    "intermediate_size": 14336,
    "max_position_embeddings": 4096,
}
INTERNLM2: Defaults = {
    **PLAIN,
    "vocab_size": 92544,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "bias": False,
}
INTERNLM3: Defaults = {
    **PLAIN,
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "max_position_embeddings": 32768,
}
FLEX_OLMO: Defaults = {
    **OLMOE,
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "num_experts_per_tok": 5,
    "num_experts": 7,
}
IQUEST_CODER: Defaults = {
    **LLAMA,
    "vocab_size": 76800,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 80,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
NANOCHAT: Defaults = {
    **PLAIN,
    "vocab_size": 50304,
    "hidden_size": 768,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "final_logit_softcapping": 15.0,
}
