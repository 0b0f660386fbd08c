"""Tiny models for tests: a config of each family, random weights for any program, and a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from quire.backends.backend import Backend
from quire.backends.reference import ReferenceBackend
from quire.models import Model, read_model
from quire.program import Load, Program, WeightSpec
from quire.program.batch import Batch

VOCAB = 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [1.5, 4.0]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {
    **_SIZES,
    **_ROUTED,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
_INDEX = {"index_topk": 24, "index_head_dim": 6, "index_n_heads": 5}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
_DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 3,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_LOCAL = {"num_hidden_layers": 3, "sliding_window": 24, "query_pre_attn_scalar": 4}

# name -> config.json: the families, then settings of theirs (with a "-") that change what a context means
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_SIZES},
    "mistral": {"architectures": ["MistralForCausalLM"], **_SIZES, "sliding_window": 20},
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "intermediate_size_mlp": 24,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 20,
        "floor_scale": 8,
        "attn_scale": 0.4,
        "head_dim": 6,
        "rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0},
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        **_SIZES,
        "head_dim": 6,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3},
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_SIZES, "tie_word_embeddings": True},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 6,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_SIZES},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        **_SIZES,
        **_MOE,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "mlp_only_layers": [2],
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 6,
        **_DELTA,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        **_SIZES,
        **_DELTA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        **_DELTA,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 6,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], **_SIZES, "num_key_value_heads": 1},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **_SIZES,
        **_LOCAL,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_SIZES,
        **_LOCAL,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        **_SIZES,
        "intermediate_size": [24, 20, 24],
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "vocab_size_per_layer_input": VOCAB - 3,
        "hidden_size_per_layer_input": 6,
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "laurel_rank": 6,
        "activation_sparsity_pattern": [0.6, 0.0, 0.3],
        "final_logit_softcapping": 3.0,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **_SIZES,
        **_MOE4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "global_head_dim": 8,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCAB - 3,
        "hidden_size_per_layer_input": 6,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_unified": {
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "model_type": "gemma4_unified_text",
        **_SIZES,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 6,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], **_SIZES},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **_SIZES},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], **_SIZES, "no_rope_layers": [1, 0]},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        **_SIZES,
        **_MULTIPLIERS,
    },
    "granite4_h": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **_SIZES,
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
        **_MULTIPLIERS,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        **_SIZES,
        **_MAMBA,
        "mamba_d_ssm": 32,
        "mamba_rms_norm": True,
        "key_multiplier": 0.5,
        "ssm_multipliers": [0.7, 0.5, 0.6, 0.8, 0.9],
        "mlp_multipliers": [0.9, 0.6],
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        **_SIZES,
        **_ROUTED,
        "hybrid_override_pattern": "ME*-MEM-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 5,
        "moe_shared_expert_intermediate_size": 12,
        "moe_latent_size": 10,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        **_SIZES,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": {"architectures": ["Glm4ForCausalLM"], **_SIZES, "attention_bias": True},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT2},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_SIZES, **_MOE},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], **_SIZES, **_MOE},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {**_YARN, "truncate": False},
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **_LATENT,
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
        "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **_LATENT,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "v_head_dim": 3,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        **_LATENT,
        "attention_bias": True,
        "routed_scaling_factor": 1.8,
    },
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"],
        **_SIZES,
        "scale_emb": 3.0,
        "scale_depth": 0.7,
        "dim_model_base": 8,
    },
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"],
        **_LATENT,
        "scale_emb": 3.0,
        "scale_depth": 0.7,
        "dim_model_base": 8,
        "mlp_bias": True,
    },
    "mistral4": {
        "architectures": ["Mistral4ForCausalLM"],
        **_LATENT,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0},
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        **_SIZES,
        **_ROUTED,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], **_SIZES},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        **_SIZES,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "rope_scaling": _YARN,
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"],
        **_SIZES,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
    },
    "stablelm": {
        "architectures": ["StableLmForCausalLM"],
        **_SIZES,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "use_qkv_bias": True,
    },
    "hunyuan": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        **_SIZES,
        "rope_scaling": {"type": "dynamic", "alpha": 20.0, "factor": 1.0},
    },
    "hunyuan_moe": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        **_SIZES,
        "num_experts": 4,
        "moe_topk": [1, 2],
    },
    "apertus": {"architectures": ["ApertusForCausalLM"], **_SIZES, "head_dim": 6},
    "phimoe": {
        "architectures": ["PhimoeForCausalLM"],
        **_SIZES,
        "num_local_experts": 4,
        "router_jitter_noise": 0.3,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_scaling": {
            **_LONGROPE,
            "original_max_position_embeddings": 64,
            "short_mscale": 1.2,
            "long_mscale": 1.2,
        },
    },
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], **_SIZES, "sliding_window": 20},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], **_SIZES, "head_dim": 6},
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **_SIZES,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_num_shared_experts": 2,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 6,
        "rotary_dim": 4,
    },
    "mellum": {
        "architectures": ["MellumForCausalLM"],
        **_SIZES,
        **_MOE,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "sliding_window": 20,
        "head_dim": 6,
        "moe_intermediate_size": 8,
    },
    "glm": {"architectures": ["GlmForCausalLM"], **_SIZES, "head_dim": 8},
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        **_SIZES,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "helium": {"architectures": ["HeliumForCausalLM"], **_SIZES},
    "jais2": {"architectures": ["Jais2ForCausalLM"], **_SIZES},
    "hyperclovax": {"architectures": ["HyperCLOVAXForCausalLM"], **_SIZES, **_MULTIPLIERS},
    "granite_swa": {
        "architectures": ["GraniteSWAForCausalLM"],
        **_SIZES,
        **_MULTIPLIERS,
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "layer_rope_theta": [0, 1e4, 500.0],
    },
    "granite_moe_swa": {
        "architectures": ["GraniteMoeSWAForCausalLM"],
        **_SIZES,
        **_MULTIPLIERS,
        "num_local_experts": 4,
        "sliding_window": 20,
    },
    "bitnet": {"architectures": ["BitNetForCausalLM"], **_SIZES, "attention_bias": True},
    "arcee": {"architectures": ["ArceeForCausalLM"], **_SIZES, "mlp_bias": True, "rope_scaling": _YARN},
    "cwm": {
        "architectures": ["CwmForCausalLM"],
        **_SIZES,
        "sliding_window": 20,
        "rope_scaling": _LLAMA3,
        "num_hidden_layers": 3,
    },
    "granite_moe": {
        "architectures": ["GraniteMoeForCausalLM"],
        **_SIZES,
        **_MULTIPLIERS,
        "num_local_experts": 4,
    },
    "granite_moe_shared": {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        **_SIZES,
        **_MULTIPLIERS,
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
    },
    "afmoe": {
        "architectures": ["AfmoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "head_dim": 6,
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "global_attn_every_n_layers": 2,
        "moe_intermediate_size": 8,
        "num_shared_experts": 1,
        "route_scale": 1.8,
        "mup_enabled": True,
    },
    "youtu": {
        "architectures": ["YoutuForCausalLM"],
        **{key: value for key, value in _LATENT.items() if key not in _ROUTED},
        "attention_bias": True,
    },
    "olmo": {"architectures": ["OlmoForCausalLM"], **_SIZES},
    "cohere": {"architectures": ["CohereForCausalLM"], **_SIZES, "use_qk_norm": True},
    "phi": {"architectures": ["PhiForCausalLM"], **_SIZES, "head_dim": 8, "qk_layernorm": True},
    "nemotron": {"architectures": ["NemotronForCausalLM"], **_SIZES, "head_dim": 8, "mlp_bias": True},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], **_SIZES, "rotary_pct": 0.5},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "block_multiple_of": 8,
        "tie_embedding": False,
    },
    "lfm2_moe": {
        "architectures": ["Lfm2MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 8,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "architectures": ["Lfm3ForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "conv_L_cache": 4,
    },
    "hy_v3": {"architectures": ["HYV3ForCausalLM"], **_SIZES, **_MOE, "moe_intermediate_size": 8},
    "dots1": {
        "architectures": ["Dots1ForCausalLM"],
        **_SIZES,
        **_ROUTED,
        "first_k_dense_replace": 1,
        "max_window_layers": 1,
        "sliding_window": 20,
        "routed_scaling_factor": 2.0,
    },
    "solar_open": {"architectures": ["SolarOpenForCausalLM"], **_SIZES, **_ROUTED, "attention_bias": True},
    "exaone_moe": {
        "architectures": ["ExaoneMoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "moe_intermediate_size": 8,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
    },
    "cohere2_moe": {
        "architectures": ["Cohere2MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "sliding_window_pattern": 2,
        "sliding_window": 20,
        "expert_selection_fn": "sigmoid",
        "num_shared_experts": 1,
    },
    "mimo_v2": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        **_SIZES,
        **_ROUTED,
        "head_dim": 12,
        "v_head_dim": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        **_SIZES,
        **_MAMBA,
        "num_hidden_layers": 3,
        "attn_layer_indices": [0, 1],
    },
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        **_LATENT,
        **_INDEX,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        **{
            key: value
            for key, value in _SIZES.items()
            if key not in ("num_key_value_heads", "intermediate_size")
        },
        **_ROUTED,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "qk_rope_head_dim": 4,
        "rope_scaling": _YARN,
        "q_lora_rank": 10,
        "o_groups": 2,
        "o_lora_rank": 6,
        "sliding_window": 20,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 5,
        "index_head_dim": 6,
        "index_n_heads": 5,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "num_hash_layers": 1,
        "swiglu_limit": 0.5,
    },
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        **_LATENT,
        **_INDEX,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "index_topk_freq": 2,
        "norm_topk_prob": False,
    },
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 8,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 6,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    },
    "olmo_hybrid": {
        "architectures": ["OlmoHybridForCausalLM"],
        **_SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "composite-qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **_SIZES,
        "vision_config": {},
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]},
    },
    "composite-qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {**_SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
    },
    "composite-qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            **_SIZES,
            "head_dim": 6,
            "rope_scaling": {"mrope_section": [1, 1, 1]},
        },
    },
    "composite-exaone4_5": {
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "text_config": {**_SIZES, "sliding_window": 20, "sliding_window_pattern": 2},
    },
    "composite-ernie4_5_vl": {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        **_SIZES,
        "moe_num_experts": [4, 4],
        "moe_k": 2,
        "moe_intermediate_size": [8, 6],
        "vision_config": {},
    },
    "composite-kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "kimi_k2",
            **_LATENT,
            "q_lora_rank": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": {
                **_YARN,
                "rope_type": None,
                "type": "yarn",
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
            },
        },
    },
    "composite-qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {**_SIZES, **_MOE, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    },
    "composite-glm4v": {
        "architectures": ["Glm4vForConditionalGeneration"],
        "text_config": {**_SIZES, "partial_rotary_factor": 0.5, "rope_scaling": {"mrope_section": [1, 1, 0]}},
    },
    "composite-glm4v_moe": {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "text_config": {**_SIZES, **_ROUTED, "head_dim": 8},
    },
    "composite-glm_ocr": {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "text_config": {**_SIZES, "head_dim": 6, "tie_word_embeddings": True},
    },
    "composite-paddleocr_vl": {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        **_SIZES,
        "tie_word_embeddings": False,
        "vision_config": {},
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]},
    },
    "bailing": {
        "architectures": ["BailingMoeForCausalLM"],
        **_SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 12,
        "use_qkv_bias": True,
    },
    "bailing2": {
        "architectures": ["BailingMoeV2ForCausalLM"],
        **_SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 12,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "sarvam_moe": {
        "architectures": ["SarvamMoEForCausalLM"],
        **_SIZES,
        **_ROUTED,
        "attention_bias": True,
        "first_k_dense_replace": 1,
    },
    "sarvam_mla": {
        "architectures": ["SarvamMLAForCausalLM"],
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "rope_scaling": {**_YARN, "rope_type": None, "type": "deepseek_yarn", "mscale_all_dim": 1.3},
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        **_SIZES,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
    },
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"], **_GPT2},
    "gpt_neo": {
        "architectures": ["GPTNeoForCausalLM"],
        **_SIZES,
        "window_size": 20,
        "attention_types": [[["local"], 1], [["global"], 1]],
    },
    "gptj": {"architectures": ["GPTJForCausalLM"], **_GPT2, "rotary_dim": 2},
    "codegen": {"architectures": ["CodeGenForCausalLM"], **_GPT2, "rotary_dim": 2},
    "vaultgemma": {
        "architectures": ["VaultGemmaForCausalLM"],
        **_SIZES,
        **_LOCAL,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "flex_olmo": {"architectures": ["FlexOlmoForCausalLM"], **_SIZES, **_MOE},
    "nanochat": {"architectures": ["NanoChatForCausalLM"], **_SIZES, "attention_bias": True},
    "iquest_coder": {"architectures": ["IQuestCoderForCausalLM"], **_SIZES, "attention_bias": True},
    "deci": {
        "architectures": ["DeciLMForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 4,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 24.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "exaone3": {"architectures": ["ExaoneForCausalLM"], **_SIZES, "num_layers": 2, "rope_scaling": _LLAMA3},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"], **_SIZES, "bias": True},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], **_SIZES},
    "llama-mqa-bias": {
        "architectures": ["LlamaForCausalLM"],
        **_SIZES,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-llama3": {"architectures": ["LlamaForCausalLM"], **_SIZES, "rope_scaling": _LLAMA3},
    "llama-dynamic": {
        "architectures": ["LlamaForCausalLM"],
        **_SIZES,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "phi3-longrope": {
        "architectures": ["Phi3ForCausalLM"],
        **_SIZES,
        "original_max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": _LONGROPE,
    },
}
FAMILIES = tuple(name for name in CONFIGS if "-" not in name)


def tiny(name: str) -> Model:
    return read_model(CONFIGS[name])


@dataclass(frozen=True)
class Dense:
    """A float32 weight."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def dense(self) -> np.ndarray:
        return self.array


def random_weights(program: Program, seed: int = 0) -> dict[str, Dense]:
    """Values of a size that keeps every layer alive: matrices by their width, vectors near one."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, spec in program.weights().items():
        scale = 2.0 / np.sqrt(spec.shape[-1]) if len(spec.shape) > 1 else 0.3
        mean = 1.0 if any(part in name for part in ("norm", "ln_", "scal", "_max")) else 0.0
        mean = -1.0 if name.endswith("_min") else mean
        numbers = mean + scale * rng.standard_normal(spec.shape)
        numbers = rng.integers(0, spec.below, spec.shape) if spec.below else numbers
        out[name] = Dense(np.asarray(numbers, np.float32))
    return out


@dataclass
class Sequence:
    """Tokens of one request, its blocks, and how many tokens are in the cache.

    Of images, (first, end) each, all tokens see each other.
    """

    token_ids: list[int]
    blocks: list[int]
    variant: int = 0
    computed: int = 0
    slot: int = 0
    images: tuple[tuple[int, int], ...] = ()

    def visible_ends(self, count: int) -> np.ndarray:
        """The ends of what the next `count` tokens see."""
        ends = np.arange(1, len(self.token_ids) + 1)
        for first, end in self.images:
            ends[first:end] = end
        return ends[self.computed : self.computed + count]


@dataclass
class Paged:
    """Runs sequences through a cache whose blocks are handed out shuffled, otherwise in each cache group.

    `make` is what computes: it takes the program, the weights, and the options of ReferenceBackend.
    """

    program: Program
    weights: Any
    block_size: int = 16
    num_blocks: int = 80
    kv_cache_dtype: str = "auto"
    seed: int = 0
    num_slots: int = 32
    make: Callable[..., Backend] = ReferenceBackend
    free: list[int] = field(init=False)
    num_sequences: int = 0

    def __post_init__(self) -> None:
        num_tables = len(self.program.cache_groups)
        self.backend = self.make(
            self.program,
            self.weights,
            num_blocks=[self.num_blocks] * num_tables,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            num_slots=self.num_slots,
        )
        rng = np.random.default_rng(self.seed)
        self.free = rng.permutation(self.num_blocks).tolist()
        others = [rng.permutation(self.num_blocks) for _ in range(1, num_tables)]
        self.ids = [np.arange(self.num_blocks), *others]  # by group: of each block, its id there

    def sequence(self, token_ids: Iterable[int], variant: int = 0) -> Sequence:
        tokens = list(token_ids)
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.block_size))]
        self.num_sequences += 1
        return Sequence(tokens, blocks, variant, slot=self.num_sequences - 1)

    def step(self, rows: list[tuple[Sequence, int]]) -> list[np.ndarray]:
        """Compute the next `count` tokens of each sequence in one batch: their logits [count, vocab]."""
        batch = batch_of(rows, self.block_size, ids=self.ids)
        logits = np.array(self.backend.execute(batch))  # kept from the next step
        for sequence, count in rows:
            sequence.computed += count
        return np.split(logits, np.cumsum([count for _, count in rows])[:-1])

    def prefill(self, sequence: Sequence, chunks: Iterable[int] = ()) -> np.ndarray:
        """All tokens that are left, in chunks of these sizes and then the rest: logits [tokens, vocab]."""
        parts = []
        for chunk in (*chunks, len(sequence.token_ids)):
            count = min(chunk, len(sequence.token_ids) - sequence.computed)
            if count:
                parts += self.step([(sequence, count)])
        return np.concatenate(parts)


def batch_of(
    rows: list[tuple[Sequence, int]],
    block_size: int,
    logits: np.ndarray | None = None,
    ids: Iterable[np.ndarray] = (),
) -> Batch:
    """The next `count` tokens of each sequence as one Batch, with logits of every token.

    `ids` (see Paged) has for each cache group what the sequences' blocks are called there.
    """
    counts = [count for _, count in rows]
    positions = [np.arange(s.computed, s.computed + count) for s, count in rows]
    ends = [s.visible_ends(count) for s, count in rows]
    tables = np.zeros((len(rows), max(len(s.blocks) for s, _ in rows)), np.int64)
    for table, (sequence, _) in zip(tables, rows, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
    return Batch(
        token_ids=np.concatenate([s.token_ids[s.computed : s.computed + count] for s, count in rows]),
        positions=np.concatenate(positions),
        row_offsets=np.cumsum([0, *counts]),
        block_tables=tuple(names[tables] for names in ids) or (tables,),
        context_lens=np.array([s.computed + count for s, count in rows]),
        slots=np.array([s.slot for s, _ in rows]),
        variants=np.array([s.variant for s, _ in rows]),
        logit_rows=np.arange(sum(counts)) if logits is None else logits,
        block_size=block_size,
        visible_ends=np.concatenate(ends) if any(s.images for s, _ in rows) else None,
    )


def load_of(rows: list[tuple[Sequence, int]], kv_itemsize: int = 4) -> Load:
    """The Load of the same batch."""
    parts = tuple((s.computed, count) for s, count in rows)
    return Load(parts, sum(count for _, count in parts), kv_itemsize)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shapes and equal float32 bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def plain(thing: Any) -> Any:
    """A program whose weights lie in the checkpoint by their own names, in canonical shape."""
    if isinstance(thing, WeightSpec):
        return replace(thing, sources=(thing.name,), transposed=False, rows=None, by_head=None, stored=())
    if isinstance(thing, tuple):
        return tuple(plain(part) for part in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: plain(getattr(thing, f.name)) for f in fields(thing)})
    return thing
