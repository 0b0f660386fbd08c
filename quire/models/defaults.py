"""The keys that each family reads from config.json, and their defaults in transformers.

They are the fields of transformers' configuration classes, under Quire's names, except those without effect
on logits: training (dropout, initializer_range, router_aux_loss_coef, ...), caching, labels and other
metadata. `tests/oracle` compares them with the classes. Only eos_token_id does not use the default of the
class: a checkpoint without one uses its tokenizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Defaults = Mapping[str, Any]

_ROPE: Defaults = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
_BIAS: Defaults = {"attention_bias": False}
PLAIN: Defaults = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    **_ROPE,
}
_WINDOW_IF_USED: Defaults = {"use_sliding_window": False, "sliding_window": 4096}

LLAMA: Defaults = {
    **PLAIN,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    **_BIAS,
    "mlp_bias": False,
}
LLAMA4: Defaults = {
    **PLAIN,
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "rope_theta": 500_000.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    **_BIAS,
}
MISTRAL: Defaults = {
    **PLAIN,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MINISTRAL3: Defaults = {
    **MISTRAL,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
QWEN2: Defaults = {
    **PLAIN,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    **_WINDOW_IF_USED,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN2_VL: Defaults = {
    **QWEN2,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
QWEN3: Defaults = {**QWEN2, **_BIAS, "head_dim": 128}
QWEN3_MOE: Defaults = {
    **PLAIN,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    **_BIAS,
    **_WINDOW_IF_USED,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
QWEN3_NEXT: Defaults = {
    **{key: value for key, value in QWEN3_MOE.items() if key not in _WINDOW_IF_USED},
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
QWEN3_VL: Defaults = {
    **PLAIN,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
    **_BIAS,
}
QWEN3_VL_MOE: Defaults = {
    **QWEN3_VL,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "mlp_only_layers": None,
}
_QWEN3_NEXT_ONLY = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "num_experts")
QWEN3_5: Defaults = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in (*_QWEN3_NEXT_ONLY, *_EXPERTS)},
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN3_5_MOE: Defaults = {
    **{key: QWEN3_NEXT[key] for key in QWEN3_NEXT if key not in ("intermediate_size", *_QWEN3_NEXT_ONLY)},
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
GEMMA2: Defaults = {
    **PLAIN,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    **_BIAS,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA2_ONLY = ("attn_logit_softcapping", "original_max_position_embeddings")
GEMMA3: Defaults = {
    **{key: value for key, value in GEMMA2.items() if key not in _GEMMA2_ONLY},
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
PHI3: Defaults = {
    **PLAIN,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
OLMO2: Defaults = {
    **PLAIN,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    **_BIAS,
}
SMOLLM3: Defaults = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    **_WINDOW_IF_USED,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
}
GRANITE: Defaults = {
    **LLAMA,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
COHERE2: Defaults = {
    **PLAIN,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    **_BIAS,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}
GLM4: Defaults = {
    **PLAIN,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
}
GPT2: Defaults = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
LFM2: Defaults = {
    **{key: value for key, value in PLAIN.items() if key != "hidden_act"},
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
    "layer_types": None,
}
_LFM2_ONLY = ("block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "full_attn_idxs")
LFM2_MOE: Defaults = {
    **{key: value for key, value in LFM2.items() if key not in _LFM2_ONLY},
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
MIXTRAL: Defaults = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_experts": 8,
}
OLMOE: Defaults = {
    **OLMO2,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}
GPT_OSS: Defaults = {
    **PLAIN,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "layer_types": None,
    "num_experts_per_tok": 4,
    "num_experts": 128,
    "swiglu_limit": 7.0,
}
GLM4_MOE: Defaults = {
    **PLAIN,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    **_BIAS,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
}
