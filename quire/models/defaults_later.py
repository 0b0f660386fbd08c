"""The keys of further families, as quire.models.defaults has them."""

from __future__ import annotations

from quire.models.defaults import GLM4, GLM4_MOE, LLAMA, OLMO2, PLAIN, Defaults

GEMMA: Defaults = {
    **PLAIN,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
QWEN2_MOE: Defaults = {
    **PLAIN,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "qkv_bias": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
STARCODER2: Defaults = {
    **PLAIN,
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_bias": True,
}
ERNIE4_5: Defaults = {
    **PLAIN,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}
ERNIE4_5_MOE: Defaults = {
    **ERNIE4_5,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 6,
    "num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_LAYERS_OF_ERNIE = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "head_dim")
ERNIE4_5_VL: Defaults = {
    **{key: value for key, value in ERNIE4_5_MOE.items() if key not in _LAYERS_OF_ERNIE},
    "moe_intermediate_size": None,
    "mlp_layer_types": None,
}
MINIMAX_M2: Defaults = {
    **PLAIN,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5_000_000.0,
    "rotary_dim": None,
    "partial_rotary_factor": None,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
SEED_OSS: Defaults = {
    **LLAMA,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
OLMO3: Defaults = {**OLMO2, "rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None}
EXAONE4: Defaults = {
    **PLAIN,
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}
STABLELM: Defaults = {
    **PLAIN,
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}
HUNYUAN: Defaults = {
    **PLAIN,
    "vocab_size": 290943,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
HUNYUAN_MOE: Defaults = {**HUNYUAN, "num_experts": 1, "num_experts_per_tok": 1}
APERTUS: Defaults = {
    **PLAIN,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
    "attention_bias": False,
}
PHIMOE: Defaults = {
    **PLAIN,
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_experts": 16,
    "router_jitter_noise": 0.01,
    "architectures": None,
    "attention_bias": False,
    "lm_head_bias": False,
}
MINICPM: Defaults = {  # of the code that is published with the checkpoints; transformers has no class
    **PLAIN,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "scale_emb": 1,
    "scale_depth": 1,
    "dim_model_base": 1,
}
GLM4V: Defaults = {
    **{key: value for key, value in GLM4.items() if key not in ("head_dim", "attention_bias")},
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
}
GLM_OCR: Defaults = {
    **GLM4V,
    "vocab_size": 59392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
}
PADDLEOCR_VL: Defaults = {
    **PLAIN,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}
GLM4V_MOE: Defaults = {
    **{key: value for key, value in GLM4_MOE.items() if key != "use_qk_norm"},
    "vocab_size": 151424,
    "max_position_embeddings": 65536,
    "attention_bias": True,
}
