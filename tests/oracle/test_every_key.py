"""Every key that a configuration class defines, with random values, present and absent, in config.json as a
stranger would write it: what transformers reads of it, Quire reads, or it refuses to.

And the noted defaults of the classes (tests/model/class_defaults.json) against those installed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import (
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

from quire.models.registry import FAMILIES, TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

KINDS = [name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in FAMILIES]
KINDS = [kind for kind in KINDS if kind not in WITHOUT_CLASS]
CLASSES = json.loads((Path(__file__).parents[1] / "model" / "class_defaults.json").read_text())
ABSENT = "absent"
SAMPLES = 14  # of each family, so that each value of a key comes up at least once
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
AS_GPT2 = ("GPT2", "GPTBigCode", "GPTJ", "CodeGen")
GPT2_SIZES = {"vocab_size": 64, "n_embd": 64, "n_layer": 3, "n_head": 8}

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_LONG = {"type": "longrope", "short_factor": 1.1, "long_factor": 3.0}  # lists once the size of heads is known
_ROPES = [
    ABSENT,
    None,
    {"rope_type": "default", "rope_theta": 300.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {**_YARN, "original_max_position_embeddings": 32},
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 8.0},
    {**_LLAMA3, "original_max_position_embeddings": 32},
    {**_LONG, "original_max_position_embeddings": 32},
    {**_LONG, "factor": 7.0},
]
_ROPES_OF_PHI3 = [
    ABSENT,
    {"rope_type": "default", "rope_theta": 300.0},
    {**_LONG, "factor": 7.0},
    {**_LONG, "type": "su", "original_max_position_embeddings": 32},
    {**_LONG, "type": "yarn", "attention_factor": 1.25},
]
_GROWING = {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_NESTED = [
    ABSENT,
    None,
    {_FULL: {"rope_type": "linear", "factor": 3.0}, _SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    {_FULL: {"rope_theta": 700.0}, _SLIDING: {**_YARN, "original_max_position_embeddings": 32}},
]
_NESTED_OF_MELLUM = [
    ABSENT,
    None,
    {_FULL: {"type": "linear", "factor": 3.0, "rope_theta": 700.0}, _SLIDING: {"rope_theta": 50.0}},
    {_FULL: {"rope_theta": 700.0}, _SLIDING: {**_YARN, "rope_theta": 50.0}},
]
_PART = {"rope_type": "proportional", "rope_theta": 90.0}
_NESTED_OF_GEMMA4 = [
    ABSENT,
    None,
    {_FULL: {**_PART, "partial_rotary_factor": 0.6}, _SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    {_FULL: {**_PART, "factor": 3.0}, _SLIDING: {"rope_theta": 700.0}},
    {_FULL: {"rope_theta": 700.0}, _SLIDING: {"type": "linear", "factor": 3.0, "rope_theta": 50.0}},
]
_FLAG = [ABSENT, True, False]
_ACT = [ABSENT, "silu", "relu", "gelu_pytorch_tanh", "gelu_new"]
_EPS = [ABSENT, 1e-3, 0.1]
_CAP = [ABSENT, None, 4.0]
_SHARE = [ABSENT, 0.3, 1.5]

# key -> what it may say. Keys of one class stand in the configs of the others too.
VALUES: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 8, 1, ABSENT],
    "head_dim": [8, 12, ABSENT],
    "max_position_embeddings": [128, 40, ABSENT],
    "n_positions": [128, ABSENT],
    "n_inner": [ABSENT, None, 70],
    "hidden_act": _ACT,
    "hidden_activation": _ACT,
    "activation_function": _ACT,
    "rms_norm_eps": _EPS,
    "layer_norm_eps": _EPS,
    "layer_norm_epsilon": _EPS,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "rope_theta": [ABSENT, 500.0, 1e6],
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "original_max_position_embeddings": [ABSENT, 32, 64],
    "partial_rotary_factor": [ABSENT, 0.5, 1.0],
    "rope_local_base_freq": [ABSENT, 300.0],
    "sliding_window": [9, ABSENT, None],
    "use_sliding_window": _FLAG,
    "layer_types": [ABSENT, [_FULL, _SLIDING, _SLIDING], [_SLIDING, _SLIDING, _FULL]],
    "max_window_layers": [ABSENT, 0, 1, 2],
    "sliding_window_pattern": [ABSENT, 2, 3],
    "no_rope_layers": [ABSENT, None, [0, 1, 1], [1, 1, 1, 0]],
    "no_rope_layer_interval": [ABSENT, 2, 3],
    "query_pre_attn_scalar": [ABSENT, 4, 24],
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "use_bidirectional_attention": [ABSENT, None, False],
    "embedding_multiplier": _SHARE,
    "residual_multiplier": _SHARE,
    "attention_multiplier": [ABSENT, 0.1, 0.3],
    "logits_scaling": _SHARE,
    "logit_scale": _SHARE,
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [ABSENT, 500.0],
    "is_decoder": _FLAG,
    "classifier_dropout": [ABSENT, 0.5],
    "num_shared_experts": [1, 2],
    "route_scale": [ABSENT, 1.0, 2.5],
    "mup_enabled": _FLAG,
    "global_attn_every_n_layers": [ABSENT, 2, 3],
    "embedding_initializer_range": [ABSENT, 0.5],
    "num_experts": [8, 9, ABSENT],
    "num_local_experts": [8, 9, ABSENT],
    "num_experts_per_tok": [1, 3, ABSENT],
    "moe_intermediate_size": [16, ABSENT],
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": [ABSENT, 1, 2],
    "q_lora_rank": [12, None],
    "kv_lora_rank": [10, 16],
    "qk_nope_head_dim": [6, 10],
    "qk_rope_head_dim": [8, 4],
    "v_head_dim": [6, 12],
    "rope_interleave": _FLAG,
    "n_routed_experts": [8, 4],
    "n_shared_experts": [ABSENT, 1, 2],
    "n_group": [1, 2, 4],
    "topk_group": [1, 2],
    "topk_method": [ABSENT, "greedy", "group_limited_greedy"],
    "routed_scaling_factor": [ABSENT, 1.0, 2.5],
    "first_k_dense_replace": [ABSENT, 0, 1, 2],
    "mlp_layer_types": [ABSENT, ["sparse", "dense", "sparse"]],
    "num_mtp_layers": [ABSENT, 0],
    "mtp_layer_types": [ABSENT, None],
    "mtp_mlp_layer_types": [ABSENT, None],
    "use_qk_norm": _FLAG,
    "scale_emb": [ABSENT, 2, 3.5],
    "scale_depth": [ABSENT, None, 0.7],
    "dim_model_base": [ABSENT, None, 32],
    "mlp_only_layers": [ABSENT, None, [], [1]],
    "full_attention_interval": [ABSENT, 2, 3],
    "linear_conv_kernel_dim": [2, 3, ABSENT],
    "linear_key_head_dim": [6, 9],
    "linear_value_head_dim": [4, 5],
    "linear_num_key_heads": [2, 1],
    "linear_num_value_heads": [2, 4],
    "shared_expert_intermediate_size": [12, 7],
    "conv_bias": _FLAG,
    "use_expert_bias": _FLAG,
    "shared_intermediate_size": [16, ABSENT],
    "position_embedding_type": [ABSENT, None, "rope", "nope"],
    "mamba_n_heads": [8, 16],
    "mamba_n_groups": [ABSENT, 2, 4],
    "mamba_d_state": [8, 12],
    "mamba_d_head": [ABSENT, "auto"],
    "mamba_d_conv": [ABSENT, 1, 3],
    "mamba_expand": [ABSENT, 1, 3],
    "mamba_chunk_size": [ABSENT, 16],
    "mamba_conv_bias": _FLAG,
    "mamba_proj_bias": _FLAG,
    "time_step_limit": [ABSENT, [0.1, 1.0]],
    "mamba_d_ssm": [64, 96, None],
    "mamba_norm_before_gate": _FLAG,
    "mamba_rms_norm": _FLAG,
    "projectors_bias": _FLAG,
    "lm_head_multiplier": _SHARE,
    "key_multiplier": _SHARE,
    "attention_in_multiplier": _SHARE,
    "attention_out_multiplier": _SHARE,
    "ssm_in_multiplier": _SHARE,
    "ssm_out_multiplier": _SHARE,
    "mlp_multipliers": [ABSENT, None, [0.9, 1.6]],
    "ssm_multipliers": [ABSENT, None, [0.7, 1.5, 0.6, 0.8, 0.9]],
    "num_logits_to_keep": [ABSENT, 1],
    "layers_block_type": [ABSENT, ["mamba", "moe", "attention"], [_FULL, "linear_attention", "mlp", "moe"]],
    "hybrid_override_pattern": [ABSENT, "M-*E"],
    "mlp_hidden_act": [ABSENT, "relu2", "silu"],
    "mamba_hidden_act": [ABSENT, "silu", "relu"],
    "use_mamba_kernels": _FLAG,
    "ssm_state_size": [8, 12],
    "mamba_num_heads": [8, 16],
    "mamba_head_dim": [6, 10],
    "n_groups": [1, 2, ABSENT],
    "conv_kernel": [ABSENT, 1, 3],
    "expand": [ABSENT, 3],
    "time_step_min": [ABSENT, 0.5],
    "time_step_max": [ABSENT, 0.2],
    "time_step_floor": [ABSENT, 0.1],
    "use_conv_bias": _FLAG,
    "chunk_size": [ABSENT, 16],
    "mamba_ssm_cache_dtype": [ABSENT, "float32"],
    "moe_shared_expert_intermediate_size": [16, 24],
    "moe_latent_size": [ABSENT, None, 12],
    "moe_shared_expert_overlap": _FLAG,
    "num_nextn_predict_layers": [ABSENT, 0],
    "mtp_layers_block_type": [ABSENT, ["attention", "moe"]],
    "use_bias": _FLAG,
    "residual_in_fp32": [ABSENT, False],
    "hidden_dropout": [ABSENT, 0.5],
    "rescale_prenorm_residual": _FLAG,
    "num_dense_layers": [1, 0, ABSENT],
    "conv_L_cache": [ABSENT, 1, 4],
    "block_multiple_of": [8, ABSENT],
    "block_ffn_dim_multiplier": [ABSENT, None, 1.3],
    "block_auto_adjust_ff_dim": _FLAG,
    "block_ff_dim": [ABSENT, 51],
    "tie_embedding": _FLAG,
    "full_attn_idxs": [ABSENT, [0, 2], [1]],
    "norm_eps": _EPS,
    "clip_qkv": [ABSENT, None],
    "swiglu_alpha": [ABSENT, 1.702],
    "swiglu_limit": [ABSENT, 1.0, 30.0],
    "altup_active_idx": [0, 1, ABSENT],
    "altup_coef_clip": [ABSENT, 0.1],
    "altup_correct_scale": _FLAG,
    "altup_num_inputs": [3, 2, ABSENT],
    "laurel_rank": [4, ABSENT],
    "activation_sparsity_pattern": [ABSENT, None, [0.0, 0.9, 0.3]],
    "global_head_dim": [12, 8],
    "num_global_key_value_heads": [ABSENT, None, 4],
    "per_layer_config": [ABSENT, {}, {"head_dim": 6}, {"head_dim": 6, "num_key_value_heads": 4}],
    "attention_k_eq_v": _FLAG,
    "num_kv_shared_layers": [ABSENT, 0, 1],
    "use_double_wide_mlp": _FLAG,
    "vocab_size_per_layer_input": [64],
    "hidden_size_per_layer_input": [0, 5],
    "enable_moe_block": _FLAG,
    "top_k_experts": [2, 3],
    "scale_attn_weights": _FLAG,
    "scale_attn_by_inverse_layer_idx": _FLAG,
    "reorder_and_upcast_attn": _FLAG,
    "add_cross_attention": [ABSENT, False],
    "moe_num_experts": [8, 9],
    "moe_k": [1, 3],
    "moe_topk": [1, 2, [1, 3, 2]],
    "attention_out_bias": _FLAG,
    "use_qkv_bias": _FLAG,
    "qk_layernorm": _FLAG,
    "use_parallel_residual": _FLAG,
    "eod_token_id": [ABSENT, 3],
    "sep_token_id": [ABSENT, 4],
    "moe_num_shared_experts": [ABSENT, 0, 1],
    "moe_layer_start_index": [ABSENT, 0, 2],
    "moe_layer_end_index": [ABSENT, -1, 1],
    "moe_layer_interval": [ABSENT, 2],
    "moe_norm_min": [ABSENT, 1e-12],
    "rotary_dim": [ABSENT, 4, 8],
    "qkv_bias": _FLAG,
    "lm_head_bias": _FLAG,
    "input_jitter_noise": [ABSENT, 0.5],
    "norm_epsilon": _EPS,
    "residual_dropout": [ABSENT, 0.5],
    "embedding_dropout": [ABSENT, 0.5],
    "use_cache": _FLAG,
    "output_router_logits": _FLAG,
    "initializer_range": [ABSENT, 0.5],
    "attention_dropout": [ABSENT, 0.5],
    "attn_pdrop": [ABSENT, 0.5],
    "embd_pdrop": [ABSENT, 0.5],
    "resid_pdrop": [ABSENT, 0.5],
    "router_aux_loss_coef": [ABSENT, 0.5],
    "router_jitter_noise": [ABSENT, 0.5],
    "pretraining_tp": [ABSENT, 1, 2],
    "pad_token_id": [ABSENT, None, 0],
    "bos_token_id": [ABSENT, 1],
    "eos_token_id": [ABSENT, None, 2],
    "summary_type": [ABSENT, "mean"],
    "summary_use_proj": _FLAG,
    "summary_activation": [ABSENT, "tanh"],
    "summary_proj_to_labels": _FLAG,
    "summary_first_dropout": [ABSENT, 0.5],
}
VALUES |= {
    "intermediate_size_mlp": [24, 40],
    "interleave_moe_layer_step": [ABSENT, 1, 2],
    "moe_layers": [ABSENT, None, [0, 2]],
    "attention_chunk_size": [ABSENT, 20, 7],
    "attn_temperature_tuning": _FLAG,
    "floor_scale": [ABSENT, 8, 30],
    "attn_scale": [ABSENT, 0.3],
}
_SPARSE = [ABSENT, ["sparse", "dense", "sparse"], ["dense", "sparse", "dense"]]
_OF_WINDOWS = [ABSENT, [_FULL, _SLIDING, _SLIDING], [_SLIDING, _FULL, _SLIDING]]
_OF_TWO = {"n_group": [1, 2], "num_experts_per_tok": [1, 2]}  # a group ranks by two experts
_OF_DSA = {
    **_OF_TWO,
    "q_lora_rank": [12, 20],
    "qk_rope_head_dim": [8, 4],
    "mlp_layer_types": _SPARSE,
    "layer_types": [ABSENT, None],
    "index_topk": [20, 50, 1, ABSENT],  # at these no two scores at the edge are so near that rounding decides
    "index_head_dim": [10, 16, ABSENT],
    "index_n_heads": [16, 20, ABSENT],
    "tie_word_embeddings": [ABSENT, False, True],
}
_CHOSEN, _ALL = "compressed_sparse_attention", "heavily_compressed_attention"
# key -> what it may say in the configs of one class, whatever VALUES has; no other class has these keys
OF_CLASS: dict[str, dict[str, list[Any]]] = {
    "BitNet": {"head_dim": [8, ABSENT], "num_key_value_heads": [8, 2, 1, None]},  # norms as wide as the model
    "Helium": {"head_dim": [8], "num_key_value_heads": [8, 2, 1]},  # its output matrix is square
    "Ministral": {"head_dim": [8, 12], "sliding_window": [9, 20, ABSENT]},
    "GraniteSWA": {"layer_rope_theta": [ABSENT, None, [900.0, 0, 50]], "sliding_window": [9, 20, ABSENT]},
    "GraniteMoeSWA": {
        "layer_rope_theta": [ABSENT, None, [900.0, 0, 50]],
        "sliding_window": [9, 20, ABSENT],
        "shared_intermediate_size": [16, 0, ABSENT],
    },
    "HyperCLOVAX": {"use_post_norm": _FLAG, "attention_multiplier": [ABSENT, None, 0.7]},
    "Lfm3": {
        "layer_types": [["conv", _FULL, _SLIDING], [_SLIDING, "conv", _FULL], ABSENT],
        "sliding_window": [9, 20, ABSENT],
        "use_sandwich_norm": _FLAG,
        "use_attention_gate": _FLAG,
        "rope_parameters": [*_NESTED, {_FULL: {**_PART, "partial_rotary_factor": 0.6}, _SLIDING: {}}],
        "rope_scaling": [ABSENT],
    },
    "HYV3": {
        "num_shared_experts": [ABSENT, 1, 2],
        "router_scaling_factor": [ABSENT, 1.0],
        "enable_moe_fp32_combine": _FLAG,
        "mlp_layer_types": _SPARSE,
    },
    "Dots1": {**_OF_TWO, "n_shared_experts": [1, 2], "num_key_value_heads": [2, 8, 1]},
    "SolarOpen": _OF_TWO,
    "ExaoneMoe": {
        **_OF_TWO,
        "num_experts": [8, 4],
        "num_shared_experts": [ABSENT, 1, 2],
        "num_key_value_heads": [2, 8, 1],
        "layer_types": _OF_WINDOWS,
        "sliding_window": [9, 20, ABSENT],
        "mlp_layer_types": _SPARSE,
    },
    "Cohere2Moe": {
        "num_experts": [8, 9],
        "num_shared_experts": [ABSENT, 0, 2],
        "shared_expert_combination_strategy": [ABSENT, "average", "sum"],
        "expert_selection_fn": [ABSENT, "softmax", "sigmoid"],
        "layer_types": _OF_WINDOWS,
        "sliding_window": [9, 20, ABSENT],
        "mlp_layer_types": _SPARSE,
        "prefix_dense_sliding_window_pattern": [ABSENT, 1, 2],
        "prefix_dense_intermediate_size": [ABSENT, None, 30],
        "rms_norm_eps": [ABSENT, None, 0.1],
    },
    "MiMoV2Flash": {
        **_OF_TWO,
        "num_key_value_heads": [2, 4, 1, ABSENT],
        "head_dim": [12, 24],  # of a third, an even number
        "layer_types": _OF_WINDOWS,
        "sliding_window": [9, 20, ABSENT],
        "sliding_window_size": [ABSENT, None, 7],
        "mlp_layer_types": _SPARSE,
        "attention_value_scale": [ABSENT, None, 1.5],
        "routed_scaling_factor": [ABSENT, None, 2.5],
        "rope_parameters": [
            ABSENT,
            None,
            {_FULL: {"rope_theta": 700.0}, _SLIDING: {"rope_theta": 50.0, "partial_rotary_factor": 0.5}},
        ],
        "rope_scaling": [ABSENT],
    },
    "Bamba": {"attn_layer_indices": [[1], [0, 2], [2]], "z_loss_coefficient": [ABSENT, 0.5]},
    "DeepseekV32": {**_OF_DSA, "rope_parameters": [*_ROPES, {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}]},
    "DeepseekV4": {
        "num_key_value_heads": [1, ABSENT],
        "head_dim": [16, 32],
        "q_lora_rank": [12, 20],
        "o_groups": [2, 4, ABSENT],
        "o_lora_rank": [10, 6],
        "num_experts_per_tok": [1, 2, 3],
        "n_shared_experts": [ABSENT, 1],
        "scoring_func": [ABSENT, "sqrtsoftplus"],
        "norm_topk_prob": [ABSENT, True],
        "attention_bias": [ABSENT, False],
        "mlp_bias": [ABSENT, False],
        "tie_word_embeddings": [ABSENT, False],
        "moe_intermediate_size": [16, 24],
        "sliding_window": [9, 20, ABSENT],
        "layer_types": [ABSENT, None, [_SLIDING, _CHOSEN, _ALL], [_CHOSEN, _SLIDING, _CHOSEN]],
        "compress_ratios": [ABSENT, None, [4, 0, 128, 0], [0, 4, 4]],
        "compress_rates": [ABSENT, None, {_CHOSEN: 4, _ALL: 8}, {_CHOSEN: 2, _ALL: 16}],
        "compress_rate_csa": [ABSENT, None, 8],
        "compress_rate_hca": [ABSENT, None, 16],
        "compress_rope_theta": [ABSENT, 900.0],
        "index_topk": [5, 9, ABSENT],
        "index_head_dim": [16, 20, ABSENT],
        "index_n_heads": [16, 20, ABSENT],
        "hc_mult": [ABSENT, 2, 3],
        "hc_sinkhorn_iters": [ABSENT, 1, 3],
        "hc_eps": [ABSENT, 1e-2],
        "mlp_layer_types": [ABSENT, None, ["hash_moe", "moe", "moe"], ["moe", "hash_moe", "moe"]],
        "num_hash_layers": [ABSENT, None, 0, 1],
        "swiglu_limit": [ABSENT, 0.5],
        "partial_rotary_factor": [ABSENT, None, 0.25, 0.5],
        "qk_rope_head_dim": [ABSENT, None, 8, 4],
        "rope_theta": [ABSENT, 500.0],
        "rope_scaling": [ABSENT, None, {**_YARN, "original_max_position_embeddings": 32}],
        "rope_parameters": [
            ABSENT,
            None,
            {"type": "linear", "factor": 3.0},
            {
                "main": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
                "compress": {**_YARN, "rope_theta": 90.0, "partial_rotary_factor": 0.25},
            },
        ],
    },
    "GlmMoeDsa": {
        **_OF_DSA,
        "indexer_types": [ABSENT, None, ["full", "shared", "full"], ["full", "shared", "shared"]],
        "index_topk_pattern": [ABSENT, None, "FSF", "FFS", ["full", "full", "shared"]],
        "index_topk_freq": [ABSENT, 1, 2, 0],
        "index_skip_topk_offset": [ABSENT, 1, 3],
    },
    "KimiLinear": {
        **_OF_TWO,
        "num_local_experts": [8, 4],
        "num_experts": [ABSENT, 8],
        "moe_intermediate_size": [16, 24],
        "qk_rope_head_dim": [8, 4, 3],
        "n_shared_experts": [ABSENT, 1, 2],
        "tie_word_embeddings": [ABSENT, False],  # theirs never ties
        "mlp_layer_types": _SPARSE,
        "layer_types": [ABSENT, None, [_LINEAR, _FULL, _LINEAR], [_FULL, _LINEAR, _FULL]],
        "linear_head_dim": [6, 10],
        "linear_num_heads": [2, 3],
        "linear_attn_config": [
            ABSENT,
            {"full_attn_layers": [1, 3], "kda_layers": [2]},
            {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 5, "num_heads": 1},
            {"short_conv_kernel_size": 2, "full_attn_layers": [1]},
        ],
        "model_max_length": [ABSENT, 100],
        "num_expert_group": [ABSENT, 1, 2],
        "moe_renormalize": _FLAG,
        "num_experts_per_token": [ABSENT, 1],
        "num_shared_experts": [ABSENT, 1, 3],
        "pad_token_id": [None, 0],
    },
    "Falcon": {
        "num_kv_heads": [8, 2, 1],
        "num_key_value_heads": [ABSENT, 2],
        "intermediate_size": [ABSENT, 40],
        "num_ln_in_parallel_attn": [ABSENT, None, 1, 2],
        "ffn_hidden_size": [ABSENT, None, 40],
        "alibi": [ABSENT, None, False],
        "new_decoder_architecture": _FLAG,
        "multi_query": _FLAG,
        "parallel_attn": _FLAG,
        "bias": _FLAG,
        "activation": [ABSENT, "gelu", "relu", "gelu_pytorch_tanh"],
        "head_dim": [ABSENT],
    },
    "GPTBigCode": {
        "multi_query": _FLAG,
        "attention_softmax_in_fp32": _FLAG,
        "scale_attention_softmax_in_fp32": _FLAG,
    },
    "GPTNeo": {
        "num_layers": [ABSENT, 3],
        "num_heads": [ABSENT, 8],
        "attention_types": [[[["global", "local"], 1], [["local"], 1]], [[["local"], 3]]],
        "window_size": [9, 20, ABSENT],
        "resid_dropout": [ABSENT, 0.5],
        "embed_dropout": [ABSENT, 0.5],
    },
    "GPTJ": {"tie_word_embeddings": [ABSENT, False], "rotary_dim": [4, 8]},
    "CodeGen": {"tie_word_embeddings": [ABSENT, False], "rotary_dim": [4, 8], "n_ctx": [ABSENT, 100]},
    "FlexOlmo": {"head_dim": [8, ABSENT], "pad_token_id": [None, 0]},
    "NanoChat": {"head_dim": [8, 16, ABSENT], "hidden_act": [ABSENT, "relu2", "silu"]},
    "IQuestCoder": {"use_sliding_window": [ABSENT, False], "clip_qkv": [ABSENT, None]},
    "SarvamMoE": _OF_TWO,
    "SarvamMLA": {
        **_OF_TWO,
        "rope_scaling": [
            ABSENT,
            None,
            {"rope_type": "linear", "factor": 3.0},
            {
                "type": "deepseek_yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale_all_dim": 1.3,
            },
        ],
    },
    "OlmoHybrid": {
        "layer_types": [ABSENT, None, [_LINEAR, _FULL, _LINEAR], [_FULL, _LINEAR, _FULL]],
        "linear_num_key_heads": [ABSENT, None, 2, 4],
        "linear_num_value_heads": [ABSENT, 8, 16],
        "linear_key_head_dim": [ABSENT, None, 6, 9],
        "linear_value_head_dim": [ABSENT, None, 4, 5],
        "linear_allow_neg_eigval": _FLAG,
        "linear_a_log_min": [ABSENT, 1.0],
        "linear_a_log_max": [ABSENT, 3.0],
        "linear_dt_min": [ABSENT, 0.01],
        "linear_dt_max": [ABSENT, 0.5],
        "linear_dt_init_floor": [ABSENT, 1e-3],
        "head_dim": [8, ABSENT],
        "rope_theta": [ABSENT, 500.0, None],
        "rope_parameters": [*_ROPES, {"rope_type": "default", "rope_theta": None}, {}],
        "pad_token_id": [None, 0],
    },
}
# Read of older checkpoints by classes that do not define them.
OLDER = ("rope_theta", "rope_scaling", "original_max_position_embeddings", "head_dim")
QWEN_NETS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
NETS = (*QWEN_NETS, "KimiLinear", "OlmoHybrid")
OF_KIMI = ("linear_attn_config", "model_max_length", "num_experts", "num_expert_group", "moe_renormalize")
OF_KIMI += ("num_experts_per_token", "num_shared_experts", "first_k_dense_replace")
OWN_OLDER = {
    "Gemma3": ("sliding_window_pattern", "rope_local_base_freq"),
    "Gemma3n": ("rope_local_base_freq",),
    "Gemma4": ("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    "Gemma4Unified": ("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    "Cohere2": ("sliding_window_pattern",),
    "Cohere2Moe": ("rope_parameters", "first_k_dense_replace"),
    "MiMoV2Flash": ("sliding_window_size",),
    "Glm": ("partial_rotary_factor",),
    "Nemotron": ("partial_rotary_factor",),
    "GPTNeoX": ("rotary_pct", "rotary_emb_base"),
    "Phi": ("partial_rotary_factor",),
    "Glm4": ("partial_rotary_factor",),
    "Glm4Moe": ("partial_rotary_factor",),
    "Phi3": ("partial_rotary_factor",),
    "Lfm2Moe": ("tie_embedding",),
    **dict.fromkeys(QWEN_NETS, ("full_attention_interval", "partial_rotary_factor")),
    "KimiLinear": OF_KIMI,
    "GlmMoeDsa": ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "DeepseekV4": (
        *("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers"),
        "qk_rope_head_dim",
    ),
    "NemotronH": ("hybrid_override_pattern",),
    "Lfm2": ("block_ff_dim", "tie_embedding"),
    "MiniMaxM2": ("rotary_dim",),
    "StableLm": ("partial_rotary_factor",),
}
GEMMA4 = ("Gemma4", "Gemma4Unified")
HALVED = ("Glm", "Glm4", "Glm4Moe", "Nemotron", "Phi", "StableLm", "Bamba")  # half of a head is rotated
_MSCALED = {**_LONG, "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 32}
OF_PHIMOE: dict[str, list[Any]] = {
    "num_experts_per_tok": [ABSENT, 2],  # theirs chooses two, whatever it says
    "tie_word_embeddings": [ABSENT, False],
    "router_jitter_noise": [ABSENT, 0.3],
    "rope_scaling": [ABSENT, None, _MSCALED, {**_MSCALED, "factor": 7.0}],
    "rope_parameters": [ABSENT, {"rope_type": "default", "rope_theta": 300.0}],
}
WINDOWED = (
    "Gemma2",
    "Gemma3",
    "Gemma3n",
    *GEMMA4,
    "Cohere2",
    "GptOss",
    "Olmo3",
    "Exaone4",
    "Mellum",
    "Cwm",
    "Afmoe",
    "VaultGemma",
)
LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu", "KimiLinear")
LATENT += ("DeepseekV32", "GlmMoeDsa", "SarvamMLA")
ROUTED = ("num_experts", "num_local_experts")  # further names of n_routed_experts, which no file has
# transformers cannot do with these in a config of another family.
NOT_BESIDE = {"partial_rotary_factor", "head_dim", "rope_parameters", "rope_scaling"}
NOT_BESIDE |= {
    "per_layer_config",
    "topk_method",
    "first_k_dense_replace",
}  # we refuse what its class would not look at


def test_the_noted_defaults_are_those_of_the_classes() -> None:
    """On a mismatch after an update of transformers: note the new ones, and see what they change."""
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    classes = {architecture(kind): config_class(kind) for kind in KINDS}
    classes |= {name: transformers.AutoConfig.for_model(name).__class__ for name in TEXTS}
    for name, of_class in classes.items():
        fields = dataclasses.fields(of_class)
        found = {field.name: field.default for field in fields if field.name not in common}
        assert CLASSES[name] == json.loads(json.dumps(found))


def sizes_of(kind: str) -> dict[str, int]:
    return GPT2_SIZES if kind in AS_GPT2 else SIZES


def keys_of(kind: str) -> list[str]:
    defined = [key for key in CLASSES[architecture(kind)] if key not in sizes_of(kind)]
    older = () if kind in (*AS_GPT2, "GPTNeo", "Mellum", *GEMMA4) else OLDER
    return sorted({*defined, *older, *OWN_OLDER.get(kind, ())})


def values_of(kind: str, key: str) -> list[Any]:
    if key in OF_CLASS.get(kind, {}):
        return OF_CLASS[kind][key]
    if key in ("rope_parameters", "rope_scaling") and kind == "Phi3":
        return _ROPES_OF_PHI3
    if key == "rope_parameters" and kind == "Gemma3":
        return _NESTED
    if key == "hidden_act" and kind == "Gemma":
        return [*_ACT, "gelu"]
    if key == "num_kv_shared_layers" and kind == "Gemma3n":
        return [0, 1]
    if key == "hidden_size_per_layer_input" and kind == "Gemma3n":
        return [5, 6]
    if key == "layer_types" and kind == "Gemma3n":
        return [[_FULL, _SLIDING, _FULL], [_SLIDING, _FULL, _SLIDING]]
    if key == "rope_parameters" and kind == "Gemma3n":
        return _NESTED
    if key == "final_logit_softcapping" and kind == "Gemma3n":
        return [ABSENT, 4.0]
    if key == "num_experts" and kind in GEMMA4:
        return [8, 9]
    if key == "moe_intermediate_size" and kind in GEMMA4:
        return [16, 24]
    if key == "rope_parameters" and kind in GEMMA4:
        return _NESTED_OF_GEMMA4
    if key == "layer_types" and kind in GEMMA4:
        return [[_FULL, _SLIDING, _FULL], [_SLIDING, _FULL, _SLIDING], ABSENT]
    if key == "rope_parameters" and kind == "Mellum":
        return _NESTED_OF_MELLUM
    if key == "rope_parameters" and kind == "Olmo3":
        return _NESTED
    if key == "rope_theta" and kind == "Olmo3":
        return [ABSENT, 500_000.0]  # theirs reads another one for the layers without window alone
    if key == "partial_rotary_factor" and kind == "StableLm":
        return [0.5, 1.0]  # the default rotates one pair of these heads, which dynamic ropes divide by
    if key == "num_key_value_heads" and kind in ("Qwen2", "Qwen3", "Exaone4", "StableLm"):
        return [2, 8, 1]  # the default are 32 heads, which is more than there are
    if key == "rope_parameters" and kind == "Mistral4":
        return [ABSENT, None, _GROWING, {**_GROWING, "mscale_all_dim": 1.3, "truncate": False}]
    if key == "rope_parameters" and kind == "Ministral3":
        return [
            ABSENT,
            None,
            _GROWING,
            {**_GROWING, "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        ]
    if key == "rope_scaling" and kind in ("Mistral4", "Ministral3"):
        return [ABSENT]
    if kind == "Phimoe" and key in OF_PHIMOE:
        return OF_PHIMOE[key]
    if key == "num_experts" and kind in ("Afmoe", "Lfm2Moe", "Qwen3_5Moe", "HunYuanMoEV1"):
        return [8, 9]
    if key == "num_key_value_heads" and kind in LATENT:
        return [8]  # each head has keys of its own
    if key == "num_experts_per_tok" and kind in (*LATENT, "Glm4Moe"):
        return [1, 2]
    if key == "n_group" and kind in ("DeepseekV3", "Glm4MoeLite", "Glm4Moe", "Mistral4"):
        return [1, 2]  # a group ranks by two experts
    if key == "v_head_dim" and kind == "MiniCPM3":
        return [6, 12, None, ABSENT]
    if key == "moe_intermediate_size" and kind == "DeepseekV2":
        return [16, 24]  # the default is a width that its products refuse
    if key == "norm_topk_prob" and kind == "DeepseekV2":
        return [ABSENT, False]  # theirs never divides by the sum
    if key == "head_dim" and kind in LATENT:
        return [ABSENT]  # an older name of qk_rope_head_dim, or without effect
    if key == "head_dim" and kind in ("GPTNeoX", "Phi3", "Olmo2", "Olmo3", "Olmoe", "StableLm"):
        return [8, ABSENT]  # these are built for hidden_size / num_attention_heads alone
    if key == "sliding_window" and kind in WINDOWED:
        return [9, 20, ABSENT]  # they always have window layers
    if key == "pad_token_id" and kind in ("Phi3", "SmolLM3", "Glm", "Glm4"):
        return [0, None]  # the default is beyond the vocabulary
    if key == "head_dim" and kind in QWEN_NETS:
        return [8, 16, ABSENT]  # a quarter is rotated, which must be even
    if key == "layer_types" and kind in QWEN_NETS:
        return [ABSENT, ["linear_attention", _FULL, "linear_attention"], [_FULL, _FULL, "linear_attention"]]
    if key == "layer_types" and kind == "GraniteMoeHybrid":  # theirs needs one with attention
        return [["mamba", "attention", "mamba"], [_FULL, "linear_attention", "linear_attention"]]
    if key == "shared_intermediate_size" and kind == "GraniteMoeShared":
        return [16, 0, ABSENT]
    if key == "tie_word_embeddings" and kind == "Phi":
        return [ABSENT, False]  # the head has a bias
    if key == "num_local_experts" and kind == "GraniteMoeHybrid":
        return [8, 9, 0, ABSENT]
    if key == "layer_types" and kind == "Llama4":
        return [ABSENT, [_FULL, "chunked_attention", "chunked_attention"]]
    if key == "layer_types" and kind in ("Lfm2", "Lfm2Moe"):
        return [ABSENT, ["conv", _FULL, "conv"], [_FULL, "conv", "conv"]]
    if key == "use_bias" and kind.startswith("Ernie"):
        return [ABSENT, False, None]
    if key == "use_bidirectional_attention" and kind in GEMMA4:
        return [ABSENT, None, "vision"]
    return VALUES[key]


def samples(kind: str) -> Iterator[dict[str, Any]]:
    """Configs that go through the values of every own key, and have a few keys of other families."""
    rng = random.Random(kind)
    own = keys_of(kind)
    turns = {key: rng.sample(list(islice(cycle(values_of(kind, key)), SAMPLES)), SAMPLES) for key in own}
    apart = NOT_BESIDE | set(ROUTED if "n_routed_experts" in own else ())
    foreign = [key for key in VALUES if key not in own and key not in SIZES and key not in apart]
    for i in range(SAMPLES):
        raw = {key: values[i] for key, values in turns.items()}
        raw |= {key: rng.choice(VALUES[key]) for key in rng.sample(foreign, 4)}
        if raw.get("rope_scaling", ABSENT) not in (ABSENT, None) and rng.random() < 0.5:
            raw["rope_scaling"] = ABSENT  # it counts more than rope_parameters, which would never count
        raw = {key: copy.deepcopy(value) for key, value in raw.items() if value != ABSENT}
        yield consistent(kind, {"architectures": [architecture(kind)], **sizes_of(kind), **raw})


def consistent(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Change what contradicts itself: lists of another length than heads have, windows that are not used."""
    width = raw.get("head_dim", CLASSES[architecture(kind)].get("head_dim")) or 64 // 8
    width = raw["qk_rope_head_dim"] if kind in LATENT else width
    for scaling in (raw.get("rope_scaling"), raw.get("rope_parameters")):
        if scaling and "long_factor" in scaling:
            part = raw.get("partial_rotary_factor", 0.5) if kind in HALVED else 1.0
            part = raw.get("partial_rotary_factor", 1.0) if kind == "Phi3" else part
            for key in ("short_factor", "long_factor"):
                scaling[key] = [1 + (scaling[key] - 1) * i for i in range(int(width * part) // 2)]
        if scaling and kind in (
            "Gemma3",
            "Gemma3n",
            "Olmo3",
        ):  # where transformers 5 passes over what it took for granted before
            scaling.pop("truncate", None)
            scaling |= {"rope_type": scaling.pop("type")} if "type" in scaling else {}
    if "n_group" in raw and "topk_group" in raw:
        raw["topk_group"] = min(raw["topk_group"], raw["n_group"])
    if kind in GEMMA4 and raw.get("per_layer_config"):  # of the layers of one type
        full = [i for i, of in enumerate(raw.get("layer_types", [_SLIDING] * 3)) if of == _FULL or i == 2]
        raw["per_layer_config"] = {f"{i:02}": raw["per_layer_config"] for i in full}
    if kind in GEMMA4 and "layer_types" not in raw:
        raw.pop("num_kv_shared_layers", None)  # only one layer is of its type
    used = raw.get("use_sliding_window", False) and raw.get("sliding_window", 9) is not None
    if kind in ("Qwen2", "Qwen2Moe", "Qwen3", "SmolLM3") and not used:
        raw.pop("layer_types", None)
    return raw


def made(
    kind: str, raw: dict[str, Any], folder: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray | float] | None:
    """Ids, transformers' logits of a random model with this config.json, and how far they may be off; None
    where it has none.
    """
    torch.manual_seed(0)
    ids = token_ids(SIZES["vocab_size"])
    try:
        config = config_class(kind).from_dict(copy.deepcopy(raw))
        config._attn_implementation = "eager"
        model = model_class(kind)(config).float().eval()
        randomize(model)
        logits = theirs(model, ids)
    except Exception:  # whatever it trips over: there is nothing to compare with
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    close = 1e-4 * np.abs(logits).max()
    return ids, logits, close + 3 * moved(model, ids, logits) if kind in NETS else close


def moved(model: Any, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """How far noise of a millionth moves the logits of each position: short keys, divided by their length,
    make much of it.
    """
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(1 + 1e-6 * torch.randn_like(table))
    return np.abs(theirs(model, ids) - logits).max(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", KINDS)
def test_random_values_of_every_key(kind: str, tmp_path: Path) -> None:
    compared = 0
    for number, raw in enumerate(samples(kind)):
        folder = tmp_path / str(number)
        if (result := made(kind, raw, folder)) is not None:
            ids, expected, close = result
            difference = np.abs(ours(folder, ids) - expected)
            assert (difference <= close).all(), f"{difference.max()} {json.dumps(raw)}"
            compared += 1
    assert compared >= SAMPLES * 2 // 3
