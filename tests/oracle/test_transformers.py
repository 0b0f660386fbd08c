"""Small random models made by transformers on the fly, loaded from the folder it writes, logits compared.

The families of the goldens in settings that those lack. Needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import (
    COMPOSITE,
    OF_OTHERS,
    OF_TEXT,
    WITHOUT_CLASS,
    architecture,
    config_class,
    model_class,
    ours,
    randomize,
    theirs,
    token_ids,
    torch,
    transformers,
)
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.models.registry import COMPOSITES, FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 1.7, 3.0, 8.0]}
ORIGINAL = {"original_max_position_embeddings": 32}
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
MOE = {"num_experts": 6, "num_experts_per_tok": 3}
LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, **LATENT}
OF_DOTS1 = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
OF_MIMO = {**OF_DOTS1, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 6}
NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "full_attention_interval": 2,
}
DELTA = {
    **NET,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
}
MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "shared_intermediate_size": 28}
OF_BAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10}
FALCON_MULTIPLIERS = ("embedding_multiplier", "lm_head_multiplier", "key_multiplier")
FALCON_MULTIPLIERS += ("attention_in_multiplier", "attention_out_multiplier")
FALCON_MULTIPLIERS += ("ssm_in_multiplier", "ssm_out_multiplier")
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 10,
    "routed_scaling_factor": 2.5,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
ALL_HEADS = {"num_key_value_heads": 6}
FULL, SLIDING = "full_attention", "sliding_attention"
HYBRID = ["linear_attention", FULL, "linear_attention"]
OF_KIMI = {**LATENT, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
OF_KIMI |= {"linear_num_heads": 3, "linear_head_dim": 10, "layer_types": HYBRID, "num_key_value_heads": 6}
OF_DSA = {**ROUTED, **ALL_HEADS, "q_lora_rank": 20, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
OF_DSA |= {"index_topk": 20, "index_head_dim": 14, "index_n_heads": 16}
CHOSEN, ALL = "compressed_sparse_attention", "heavily_compressed_attention"
OF_V4 = {
    "num_key_value_heads": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "head_dim": 24,
    "q_lora_rank": 20,
    "o_groups": 3,
    "o_lora_rank": 10,
    "sliding_window": 9,
    "compress_rates": {CHOSEN: 4, ALL: 8},
    "index_topk": 5,
    "index_head_dim": 14,
    "index_n_heads": 16,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "partial_rotary_factor": 0.25,
}
OF_OLMO_HYBRID = {key: size for key, size in NET.items() if key.startswith("linear")}
OF_OLMO_HYBRID |= {"layer_types": HYBRID}
PART = {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.6, "factor": 2.0}
DEEP = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}

GEMMA3N = {
    "head_dim": 8,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 5,
    "num_kv_shared_layers": 0,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.8, 0.0, 0.3],
    "final_logit_softcapping": 4.0,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "layer_types": [FULL, SLIDING, FULL],
}

TOWER = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 4,
    "head_dim": 8,
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "deepstack_visual_indexes": [0],
}

# (name, class, config), of composites the config of their text model
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mqa", "Llama", {"num_key_value_heads": 1}),
    ("head-dim", "Llama", {"head_dim": 10, "attention_bias": True}),
    ("tied", "Llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    ("relu", "Llama", {"hidden_act": "relu"}),
    ("gelu", "Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama3-old-key", "Llama", {"rope_scaling": {"type": "llama3", **LLAMA3, **ORIGINAL}}),
    ("linear", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("dynamic-short", "Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    (
        "dynamic-long",
        "Llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    ("yarn", "Llama", {"rope_scaling": YARN}),
    ("yarn-mscale", "Llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("yarn-attention-factor", "Llama", {"rope_scaling": {**YARN, "attention_factor": 1.25}}),
    ("yarn-betas", "Llama", {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}}),
    ("yarn-no-original", "Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("plain", "Mistral", {"sliding_window": None}),
    ("window", "Mistral", {"sliding_window": 9, "head_dim": 10}),
    (
        "scout",
        "Llama4",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "attention_chunk_size": 20,
            "intermediate_size_mlp": 50,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "no_rope_layer_interval": 2,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "high_freq_factor": 1.0},
        },
    ),
    (
        "maverick",
        "Llama4",
        {
            "head_dim": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 9,
            "attn_temperature_tuning": False,
            "intermediate_size_mlp": 30,
            "attention_bias": True,
        },
    ),
    ("unstated", "Ministral3", {"head_dim": 8, "sliding_window": 9}),
    ("growth", "Ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3, "rope_theta": 500.0}}),
    ("growth", "Mistral3", {"model_type": "ministral3", "head_dim": 8}),
    ("mrope", "Qwen2VL", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}),
    (
        "windows",
        "Qwen2_5_VL",
        {
            "rope_parameters": {**YARN, "mrope_section": [1, 1, 2]},
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    (
        "mrope",
        "Qwen3VL",
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    ),
    ("yarn", "Qwen3VL", {"head_dim": 12, "attention_bias": True, "rope_parameters": YARN}),
    ("sparse", "Qwen3VLMoe", {**MOE, "moe_intermediate_size": 20, "mlp_only_layers": [1]}),
    (
        "part",
        "Glm4v",
        {"rope_parameters": {**HALF, "mrope_section": [1, 1, 0]}},
    ),
    (
        "whole",
        "Glm46V",
        {"model_type": "glm4v_text", "rope_parameters": {**YARN, "mrope_section": [1, 1, 2]}},
    ),
    (
        "groups",
        "Glm4vMoe",
        {
            **OF_DOTS1,
            "head_dim": 16,
            "n_group": 2,
            "rope_parameters": {**HALF, "mrope_section": [1, 1, 2]},
        },
    ),
    (
        "tied",
        "GlmOcr",
        {
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]},
        },
    ),
    ("tied", "PaddleOCRVL", {"head_dim": 12, "rope_parameters": {**YARN, "mrope_section": [1, 2, 3]}}),
    ("window-layers", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("window-unused", "Qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}),
    (
        "window-layers",
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "head_dim": 12},
    ),
    ("bias", "Qwen3", {"attention_bias": True, "head_dim": 12, "rope_scaling": YARN}),
    ("window", "Qwen3Moe", {**MOE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    ("sparse-step", "Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    (
        "bias",
        "Qwen3Next",
        {**MOE, **DELTA, "attention_bias": True, "mlp_only_layers": [1]},
    ),
    (
        "types",
        "Qwen3Next",
        {
            **MOE,
            **DELTA,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "partial_rotary_factor": 0.5,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    ("net", "Qwen3_5", {**NET, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    ("sparse", "Qwen3_5Moe", {**DELTA, **MOE, "full_attention_interval": 3, "linear_conv_kernel_dim": 3}),
    ("pattern", "Gemma2", {"sliding_window": 9, "head_dim": 8, "query_pre_attn_scalar": 20}),
    ("yarn", "Gemma2", {"head_dim": 8, "final_logit_softcapping": None, "rope_scaling": YARN}),
    ("pattern", "Gemma3", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 8}),
    ("final-cap", "Gemma3", {"head_dim": 8, "final_logit_softcapping": 4.0, "rope_local_base_freq": 200.0}),
    (
        "streams",
        "Gemma3n",
        {
            **GEMMA3N,
            "altup_num_inputs": 4,
            "altup_active_idx": 2,
            "num_kv_shared_layers": 1,
            "layer_types": [SLIDING, FULL, FULL],
            "attention_bias": True,
        },
    ),
    (
        "plain",
        "Gemma3n",
        {**GEMMA3N, "intermediate_size": [40, 24, 40], "altup_num_inputs": 1, "altup_correct_scale": False},
    ),
    (
        "shared",
        "Gemma4",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 96,
        },
    ),
    (
        "experts",
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "attention_bias": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
            "final_logit_softcapping": 4.0,
        },
    ),
    ("ropes", "Gemma4Unified", {**GEMMA4, "rope_parameters": {FULL: PART, SLIDING: {"rope_theta": 50.0}}}),
    ("window", "Phi3", {"sliding_window": 9}),
    ("longrope-short", "Phi3", {"rope_scaling": {"type": "longrope", **LONG}, **ORIGINAL}),
    ("scaled", "Olmo2", {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True}),
    ("no-rope-interval", "SmolLM3", {"no_rope_layer_interval": 2}),
    ("bias", "Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2}),
    ("pattern", "Cohere2", {"sliding_window": 9, "sliding_window_pattern": 2, "attention_bias": True}),
    ("no-bias", "Glm4", {"head_dim": 8, "partial_rotary_factor": 1.0}),
    ("tied", "Glm4", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("conv-bias", "Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    (
        "sparse",
        "Lfm2Moe",
        {
            **MOE,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.7,
        },
    ),
    ("unstated", "Lfm3", {"num_hidden_layers": 5, "head_dim": 8, "sliding_window": 9}),
    (
        "bare",
        "Lfm3",
        {
            "head_dim": 10,
            "layer_types": [SLIDING, "conv", FULL],
            "sliding_window": 20,
            "rope_parameters": {FULL: YARN, SLIDING: PART},
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    ("experts", "HYV3", {**MOE, "head_dim": 10, "moe_intermediate_size": 20}),
    (
        "types",
        "HYV3",
        {
            **MOE,
            "head_dim": 8,
            "moe_intermediate_size": 20,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": YARN,
        },
    ),
    ("groups", "Dots1", {**OF_DOTS1, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    ("windows", "Dots1", {**OF_DOTS1, "sliding_window": 9, "max_window_layers": 1, "norm_topk_prob": True}),
    ("plain", "SolarOpen", {**OF_DOTS1, "head_dim": 12, "norm_topk_prob": False}),
    ("groups", "SolarOpen", {**OF_DOTS1, "n_group": 2, "attention_bias": True, "rope_scaling": YARN}),
    (
        "windows",
        "ExaoneMoe",
        {**MOE, "moe_intermediate_size": 20, "sliding_window": 9, "sliding_window_pattern": 2},
    ),
    (
        "groups",
        "ExaoneMoe",
        {
            **MOE,
            "moe_intermediate_size": 20,
            "layer_types": [FULL, SLIDING, FULL],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "n_group": 2,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    (
        "prefix",
        "Cohere2Moe",
        {
            **MOE,
            "head_dim": 10,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 2,
            "prefix_dense_intermediate_size": 30,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "num_shared_experts": 2,
        },
    ),
    (
        "sigmoid",
        "Cohere2Moe",
        {
            **MOE,
            "head_dim": 8,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window": 20,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    (
        "unstated",
        "MiMoV2Flash",
        {**OF_MIMO, "num_hidden_layers": 6, "sliding_window_size": 8},
    ),
    (
        "ropes",
        "MiMoV2Flash",
        {
            **OF_MIMO,
            "head_dim": 12,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                FULL: {**YARN, "partial_rotary_factor": 0.5, "rope_theta": 900.0},
                SLIDING: {"rope_theta": 700.0},
            },
            "sliding_window": 20,
            "attention_value_scale": None,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    ("unstated", "DeepseekV32", {**OF_DSA, "qk_rope_head_dim": 8}),
    (
        "groups",
        "DeepseekV32",
        {
            **OF_DSA,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "mlp_bias": True,  # which theirs ignores
            "rope_parameters": {**YARN, "rope_theta": 700.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    (
        "unstated",
        "DeepseekV4",
        {**OF_V4, "layer_types": [SLIDING, CHOSEN, ALL]},
    ),
    (
        "limits",
        "DeepseekV4",
        {
            **OF_V4,
            "layer_types": [ALL, CHOSEN, CHOSEN],
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**YARN, "beta_fast": 8.0},
            "compress_rope_theta": 900.0,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 1e-2,
            "swiglu_limit": 0.5,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-3,
        },
    ),
    (
        "ratios",
        "DeepseekV4",
        {**OF_V4, "compress_ratios": [4, 0, 128, 0], "compress_rates": {CHOSEN: 2, ALL: 16}, "index_topk": 9},
    ),
    ("shared", "GlmMoeDsa", {**OF_DSA, "indexer_types": ["full", "shared", "full"]}),
    ("pattern", "GlmMoeDsa", {**OF_DSA, "index_topk_pattern": "FSS", "first_k_dense_replace": 0}),
    ("unstated", "GlmMoeDsa", {**OF_DSA, "index_topk": 1, "rms_norm_eps": 1e-3}),
    ("unstated", "KimiLinear", OF_KIMI),
    (
        "groups",
        "KimiLinear",
        {
            **OF_KIMI,
            "q_lora_rank": 12,
            "attention_bias": True,
            "n_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "layer_types": [FULL, "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_conv_kernel_dim": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    ("7b", "Falcon", {"num_kv_heads": 6}),
    ("40b", "Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "rope_scaling": YARN}),
    (
        "11b",
        "Falcon",
        {
            "num_kv_heads": 3,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 40,
        },
    ),
    ("after", "Falcon", {"parallel_attn": False, "multi_query": False, "bias": True, "activation": "relu"}),
    ("shared", "GPTBigCode", {"n_inner": 40}),
    ("by-head", "GPTBigCode", {"multi_query": False, "scale_attn_weights": False}),
    ("windows", "GPTNeo", {"window_size": 9, "attention_types": [[["global", "local"], 1], [["local"], 1]]}),
    ("part", "GPTJ", {"rotary_dim": 4, "n_inner": 40}),
    ("whole", "GPTJ", {"rotary_dim": 8, "activation_function": "relu"}),
    ("part", "CodeGen", {"rotary_dim": 4, "num_attention_heads": 8, "hidden_size": 64}),
    (
        "bias",
        "VaultGemma",
        {"sliding_window": 9, "head_dim": 8, "query_pre_attn_scalar": 20, "attention_bias": True},
    ),
    ("normed", "FlexOlmo", {**MOE, "norm_topk_prob": True, "attention_bias": True}),
    ("capped", "NanoChat", {"final_logit_softcapping": 2.0, "attention_bias": True}),
    ("uncapped", "NanoChat", {"final_logit_softcapping": None, "rope_scaling": YARN}),
    ("biases", "IQuestCoder", {"head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    (
        "windows",
        "Exaone4_5_",
        {
            "model_type": "exaone4",
            "head_dim": 10,
            "sliding_window": 9,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
    ),
    (
        "tied",
        "Exaone4_5_",
        {"model_type": "exaone4", "sliding_window": 20, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    (
        "text",
        "Ernie4_5_VLMoe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": [20, 12],
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "mrope_section": [1, 1, 2]},
        },
    ),
    (
        "types",
        "Ernie4_5_VLMoe",
        {
            "moe_num_experts": 6,
            "moe_k": 1,
            "moe_intermediate_size": [20, 12],
            "moe_num_shared_experts": 0,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
    ),
    ("unstated", "SarvamMoE", {**OF_DOTS1, "head_dim": 12}),
    (
        "groups",
        "SarvamMoE",
        {
            **OF_DOTS1,
            "head_dim": 8,
            "n_group": 2,
            "first_k_dense_replace": 0,
            "use_qkv_bias": True,
            "use_qk_norm": False,
            "norm_topk_prob": False,
            "rope_scaling": YARN,
        },
    ),
    ("unstated", "SarvamMLA", {**ROUTED, **ALL_HEADS}),
    (
        "yarn",
        "SarvamMLA",
        {
            **ROUTED,
            **ALL_HEADS,
            "q_lora_rank": 12,
            "n_group": 2,
            "rope_interleave": False,
            "rope_scaling": {**DEEP, "rope_type": None, "type": "deepseek_yarn"},
        },
    ),
    ("rotated", "OlmoHybrid", {"rope_parameters": {"rope_theta": 500.0}, "layer_types": HYBRID}),
    (
        "shared-keys",
        "OlmoHybrid",
        {
            **OF_OLMO_HYBRID,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
        },
    ),
    ("positive", "OlmoHybrid", {**OF_OLMO_HYBRID, "linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3}),
    ("hybrid", "Bamba", {**OF_BAMBA, "attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True}),
    (
        "biases",
        "Bamba",
        {
            **OF_BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": (0.2, 1.5),
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "linear", "factor": 3.0},
        },
    ),
    ("kernel", "Lfm2", {"full_attn_idxs": [0], "conv_L_cache": 5, "block_multiple_of": 12}),
    ("window", "Mixtral", {"sliding_window": 9, "num_local_experts": 3, "hidden_act": "gelu_pytorch_tanh"}),
    ("normed", "Olmoe", {**MOE, "norm_topk_prob": True}),
    ("no-scaling", "GptOss", {"head_dim": 8, "num_local_experts": 5, "rope_scaling": None}),
    ("window", "GptOss", {"head_dim": 8, "num_local_experts": 5, "sliding_window": 9}),
    ("greedy", "DeepseekV2", {**ROUTED, **ALL_HEADS, "q_lora_rank": None, "first_k_dense_replace": 1}),
    (
        "groups",
        "DeepseekV2",
        {
            **ROUTED,
            **ALL_HEADS,
            "q_lora_rank": 12,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            "rope_scaling": DEEP,
        },
    ),
    ("dense", "DeepseekV3", {**ROUTED, **ALL_HEADS, "q_lora_rank": 9, "attention_bias": True}),
    (
        "groups",
        "DeepseekV3",
        {
            **ROUTED,
            **ALL_HEADS,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": DEEP,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "v_head_dim": 13,
        },
    ),
    (
        "halves",
        "DeepseekV3",
        {
            **ROUTED,
            **ALL_HEADS,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "num_nextn_predict_layers": 0,
        },
    ),
    ("types", "Glm4MoeLite", {**ROUTED, **ALL_HEADS, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("bias", "Glm4MoeLite", {**ROUTED, **ALL_HEADS, "q_lora_rank": 11, "attention_bias": True}),
    ("long", "MiniCPM3", {**LATENT, **ALL_HEADS, "q_lora_rank": 12, "mlp_bias": True, "scale_depth": 0.9}),
    ("plain", "MiniCPM3", {**LATENT, **ALL_HEADS, "q_lora_rank": None, "v_head_dim": None, "scale_emb": 3}),
    ("unstated", "Mistral4", {**ROUTED, **ALL_HEADS, "q_lora_rank": 12, "n_shared_experts": 2}),
    (
        "growth",
        "Mistral4",
        {
            **ROUTED,
            **ALL_HEADS,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "rope_parameters": {**DEEP, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
        },
    ),
    (
        "hybrid",
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 5,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "time_step_limit": (0.2, 1.5),
            **MULTIPLIERS,
        },
    ),
    (
        "dense",
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    ("plain", "FalconH1", {**MAMBA, "mamba_d_ssm": 42, "mamba_n_heads": 6, "mamba_n_groups": 3}),
    (
        "multipliers",
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "ssm_multipliers": [0.7, 1.5, 0.6, 0.8, 0.9],
            "mlp_multipliers": [1.3, 0.6],
            **{name: 0.5 + number / 4 for number, name in enumerate(FALCON_MULTIPLIERS)},
        },
    ),
    (
        "pattern",
        "NemotronH",
        {**NEMOTRON, "hybrid_override_pattern": "M-*EM", "use_bias": True, "mlp_bias": True, "n_group": 2},
    ),
    (
        "latent",
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["moe", "mamba", "attention"],
            "moe_latent_size": 12,
            "mlp_hidden_act": "silu",
            "use_conv_bias": False,
            "norm_topk_prob": False,
            "time_step_min": 0.5,
        },
    ),
    ("norms", "Glm4Moe", {**ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    ("groups", "Glm4Moe", {**ROUTED, "head_dim": 12, "n_group": 2, "first_k_dense_replace": 0}),
    ("bias", "Gemma", {"head_dim": 12, "attention_bias": True, "hidden_act": "silu"}),
    (
        "windows",
        "Qwen2Moe",
        {
            **MOE,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 12,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    ("plain", "Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("scaled", "Ernie4_5", {"head_dim": 10, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    (
        "interval",
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    (
        "part",
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "rotary_dim": 6},
    ),
    ("xielu", "Apertus", {"head_dim": 10, "attention_bias": True, "rope_scaling": YARN}),
    ("unstated", "Apertus", {"hidden_act": "relu2"}),
    (
        "margin",
        "Phimoe",
        {"num_local_experts": 6, "router_jitter_noise": 0.4, "attention_bias": True, "lm_head_bias": True},
    ),
    ("biases", "SeedOss", {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
    ("no-bias", "SeedOss", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    (
        "windows",
        "Olmo3",
        {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING], "rope_scaling": YARN},
    ),
    ("hybrid", "Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    ("full", "Exaone4", {"sliding_window": None, "layer_types": [FULL] * 3, "rope_scaling": YARN}),
    ("beside", "StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    ("by-head", "StableLm", {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 1.0}),
    ("alpha", "HunYuanDenseV1", {"head_dim": 10, "rope_scaling": ALPHA, "attention_bias": True}),
    ("plain", "HunYuanDenseV1", {"head_dim": 8, "tie_word_embeddings": True}),
    ("experts", "HunYuanMoEV1", {"head_dim": 8, "num_experts": 6, "moe_topk": [2, 3, 1]}),
    (
        "ropes",
        "Mellum",
        {
            **MOE,
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_intermediate_size": 20,
            "attention_bias": True,
            "rope_parameters": {FULL: {**YARN, "rope_theta": 900.0}, SLIDING: {"rope_theta": 50.0}},
        },
    ),
    ("unstated", "Mellum", {**MOE, "head_dim": 10, "moe_intermediate_size": 20, "norm_topk_prob": False}),
    ("part", "Glm", {"head_dim": 8, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    ("no-bias", "Glm", {"head_dim": 12, "attention_bias": False, "tie_word_embeddings": True}),
    ("no-gate", "Arcee", {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "rope_scaling": YARN}),
    ("mixed", "Ministral", {"head_dim": 10, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}),
    ("pairs", "Helium", {"head_dim": 8, "num_key_value_heads": 2, "rope_scaling": YARN}),
    ("norms", "Jais2", {"head_dim": 10, "rope_scaling": YARN, "tie_word_embeddings": True}),
    ("norms", "HyperCLOVAX", {"head_dim": 10, "rope_scaling": YARN, **MULTIPLIERS}),
    ("unscaled", "HyperCLOVAX", {"head_dim": 10, "use_post_norm": False, "attention_bias": True}),
    (
        "sinks",
        "GraniteSWA",
        {"sliding_window": 9, "layer_rope_theta": [900.0, 0, 50], "rope_scaling": YARN, **MULTIPLIERS},
    ),
    (
        "experts",
        "GraniteMoeSWA",
        {
            "num_local_experts": 5,
            "shared_intermediate_size": 28,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
            **MULTIPLIERS,
        },
    ),
    ("norms", "BitNet", {"attention_bias": True, "rope_scaling": YARN}),
    ("windows", "Cwm", {"head_dim": 8, "sliding_window": 9, "mlp_bias": True}),
    ("experts", "GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 3, **MULTIPLIERS}),
    (
        "shared",
        "GraniteMoeShared",
        {"num_local_experts": 5, "shared_intermediate_size": 28, "attention_bias": True, **MULTIPLIERS},
    ),
    ("alone", "GraniteMoeShared", {"num_local_experts": 5, "tie_word_embeddings": True}),
    (
        "gates",
        "Afmoe",
        {
            **MOE,
            "head_dim": 10,
            "sliding_window": 9,
            "global_attn_every_n_layers": 3,
            "moe_intermediate_size": 20,
            "route_scale": 1.7,
            "mup_enabled": True,
            "attention_bias": True,
        },
    ),
    (
        "types",
        "Afmoe",
        {
            **MOE,
            "head_dim": 8,
            "layer_types": [FULL, SLIDING, FULL],
            "num_dense_layers": 2,
            "sliding_window": 9,
        },
    ),
    ("halves", "Youtu", {**LATENT, **ALL_HEADS, "q_lora_rank": 12, "rope_interleave": False}),
    ("plain", "Youtu", {**LATENT, **ALL_HEADS, "q_lora_rank": None, "rope_scaling": DEEP}),
    ("scaled", "Olmo", {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True}),
    ("plain", "Cohere", {"logit_scale": 0.3, "attention_bias": True}),
    ("by-head", "Cohere", {"use_qk_norm": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-3}),
    ("one-head", "Cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    ("plain", "Phi", {}),
    ("normed", "Phi", {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    ("biases", "Nemotron", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    ("plain", "Nemotron", {"partial_rotary_factor": 1.0, "hidden_act": "silu", "norm_eps": 1e-3}),
    ("beside", "GPTNeoX", {"rotary_pct": 0.5, "rotary_emb_base": 500.0}),
    (
        "after",
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "rotary_pct": 1.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    ("inverse-layers", "GPT2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 70}),
    ("unscaled", "GPT2", {"scale_attn_weights": False, "activation_function": "relu"}),
]


AS_GPT2 = ("GPT2", "GPTBigCode", "GPTJ", "CodeGen")


def make(kind: str, changes: dict[str, Any], folder: Path) -> Any:
    """A random model of transformers, saved to the folder."""
    torch.manual_seed(0)
    foreign = ("intermediate_size", "num_key_value_heads") if kind in AS_GPT2 else ()
    sizes = {name: size for name, size in SIZES.items() if name not in foreign}
    text: dict[str, Any] = {**sizes, **changes}
    if kind in COMPOSITE:
        text = {"text_config": text, "vision_config": TOWER}
    config = config_class(kind)(**text, attn_implementation="eager")
    model = model_class(kind)(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    if kind in OF_OTHERS:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture(kind)]}))
    return model


@pytest.mark.parametrize(
    ("name", "kind", "changes"), CASES, ids=[f"{kind}-{name}" for name, kind, _ in CASES]
)
def test_logits(name: str, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make(kind, changes, tmp_path)
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()
    assert expected.std() > 0.05


@pytest.mark.parametrize(("change", "own"), [(0.0, False), (0.5, True)])
def test_a_tied_head_that_differs(change: float, own: bool, tmp_path: Path) -> None:
    """Both sides take the head of the checkpoint where it is another one than the embedding."""
    make("Qwen2", {"tie_word_embeddings": True}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(change)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = model_class("Qwen2").from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is not loaded.model.embed_tokens.weight) is own
    assert describe(EngineConfig(model=str(tmp_path))).own_head is own


def test_minicpm_is_granite_with_other_names(tmp_path: Path) -> None:
    multipliers = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 3**0.5,
        "logits_scaling": 48 / 16,
    }
    model = make("Granite", {**multipliers, "attention_multiplier": 8**-0.5}, tmp_path)
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    own = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": False}
    raw = {**SIZES, **own, "architectures": ["MiniCPMForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def packed(tensors: dict[str, Any], layer: str, groups: int, kind: str = "weight") -> np.ndarray:
    """Return queries, keys and values in one matrix, part by part in each of so many groups."""
    arrays = [tensors.pop(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
    joined = np.concatenate([array.reshape(groups, -1, *array.shape[1:]) for array in arrays], axis=1)
    return joined.reshape(-1, *arrays[0].shape[1:])


TO_BAILING = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
TO_EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
TO_INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
OF_GLM = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
}
OF_GLM |= {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "head_dim": 8, "use_qk_norm": True}
OF_GLM |= {"routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}
# Families without a class in transformers: one that computes the same, its settings and ours, the names of
# tensors here, and the one of queries, keys and values together.
RENAMED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str], tuple[str, int]]] = {
    "BailingMoeV2": (
        "Glm4Moe",
        OF_GLM | {"n_routed_experts": 8, "n_shared_experts": 1},
        OF_GLM | {"num_shared_experts": 1},
        TO_BAILING,
        ("attention.query_key_value", 1),
    ),
    "Exaone": (
        "Llama",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, **ORIGINAL}},
        {"num_layers": 3, "rope_scaling": {"rope_type": "llama3", **LLAMA3, **ORIGINAL}},
        TO_EXAONE,
        ("", 1),
    ),
    "InternLM2": (
        "Llama",
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "bias": False},
        TO_INTERNLM2,
        ("attention.wqkv", 2),
    ),
    "InternLM3": ("Llama", {}, {"bias": False, "qkv_bias": False}, {}, ("", 1)),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_families_that_compute_what_others_do(kind: str, tmp_path: Path) -> None:
    other, settings, own, names, (joined, groups) = RENAMED[kind]
    model = make(other, settings, tmp_path)
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    tensors = load_file(tmp_path / "model.safetensors")
    if joined:
        for layer in range(SIZES["num_hidden_layers"]):
            place = f"model.layers.{layer}"
            tensors[f"{place}.{joined}.weight"] = packed(tensors, place, groups)
    renamed = {}
    for name, tensor in tensors.items():
        for theirs_, ours_ in names.items():
            name = name.replace(theirs_, ours_)
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    sizes = {
        name: size for name, size in SIZES.items() if name != "num_hidden_layers" or "num_layers" not in own
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes | own | {"architectures": [f"{kind}ForCausalLM"]}))
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_bailing_is_qwen2_moe_with_its_shared_expert_whole(tmp_path: Path) -> None:
    """Theirs is times a sigmoid, which is a half for weights of zero."""
    own = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
    model = make("Qwen2Moe", own | {"shared_expert_intermediate_size": 40}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.shared_expert_gate.weight.zero_()
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    for layer in range(SIZES["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            tensors[f"{place}.attention.query_key_value.{kind}"] = packed(tensors, place, 1, kind)
        del tensors[f"{place}.mlp.shared_expert_gate.weight"]
        tensors[f"{place}.mlp.shared_expert.down_proj.weight"] *= 0.5
    renamed = {}
    for name, tensor in tensors.items():
        for theirs_, ours_ in (TO_BAILING | {"shared_expert.": "shared_experts."}).items():
            name = name.replace(theirs_, ours_)
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    raw = {**SIZES, **own, "num_shared_experts": 2, "use_qkv_bias": True, "norm_head": False}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["BailingMoeForCausalLM"]}))
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["KimiK25", "Kimi_K25"])
def test_the_text_model_of_kimi_k25(name: str, tied: bool, tmp_path: Path) -> None:
    """Under the names that it was published with; transformers calls its layers blocks when it saves them."""
    text = {
        **SIZES,
        **ROUTED,
        **ALL_HEADS,
        "q_lora_rank": 12,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": DEEP,
    }
    text |= {"model_type": "deepseek_v3", "first_k_dense_replace": 1}
    torch.manual_seed(0)
    whole = {"text_config": text, "vision_config": TOWER, "tie_word_embeddings": tied}
    config = transformers.Kimi_K25Config(**whole, attn_implementation="eager")
    model = transformers.Kimi_K25ForConditionalGeneration(config).float().eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = {key.replace("model.blocks", "model.layers"): value for key, value in tensors.items()}
    save_file(published, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["model_type"] = "kimi_k2"
    raw["architectures"] = [f"{name}ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_every_family_is_compared() -> None:
    composites = {*COMPOSITES} - {f"{kind}ForConditionalGeneration" for kind in OF_TEXT}
    compared = {architecture(kind) for kind in (*(kind for _, kind, _ in CASES), *WITHOUT_CLASS)}
    images = (
        *("AyaVision", "Cohere2Vision", "Idefics3", "InternVL", "Lfm2Vl", "LightOnOcr", "LightOnOCR"),
        *("KimiK25", "Kimi_K25", "Llava", "SmolVLM"),
    )
    elsewhere = {f"{kind}ForConditionalGeneration" for kind in images}
    assert compared | elsewhere == {*FAMILIES, *composites}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("DeepseekV32", OF_DSA),
        ("GlmMoeDsa", {**OF_DSA, "indexer_types": ["full", "shared", "full"]}),
        ("DeepseekV4", {**OF_V4, "layer_types": [SLIDING, CHOSEN, ALL]}),
        ("DeepseekV4", {**OF_V4, "layer_types": [ALL, CHOSEN, CHOSEN], "partial_rotary_factor": 0.5}),
    ],
)
def test_greedy_tokens_of_contexts_longer_than_what_is_chosen(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks, beside others, and again over cached blocks."""
    torch.manual_seed(1)
    config = config_class(kind)(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = model_class(kind)(config).float().eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(i).integers(3, 96, n).tolist() for i, n in enumerate((60, 5, 33, 70))]
    how: dict[str, Any] = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist() for ids in prompts]
    llm = LLM(str(tmp_path), device="native", max_num_batched_tokens=32, max_num_seqs=3)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(2):
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outs] == expected
    llm.close()
