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
_PLAIN: Defaults = {
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
    **_PLAIN,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    **_BIAS,
    "mlp_bias": False,
}
MISTRAL: Defaults = {
    **_PLAIN,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2: Defaults = {
    **_PLAIN,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    **_WINDOW_IF_USED,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN3: Defaults = {**QWEN2, **_BIAS, "head_dim": 128}
QWEN3_MOE: Defaults = {
    **_PLAIN,
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
GEMMA2: Defaults = {
    **_PLAIN,
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
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
PHI3: Defaults = {
    **_PLAIN,
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
    **_PLAIN,
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
    **_PLAIN,
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
    **_PLAIN,
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
    **_PLAIN,
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
