"""The metadata of GGUF files that tests make of tiny checkpoints."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

Config = dict[str, Any]


def metadata_of(architecture: str, config: Config, later: int) -> dict[str, Any]:
    """The keys of the metadata, without the architecture before them; `later` are prediction layers."""
    get, heads = config.get, config["num_attention_heads"]
    latent = "kv_lora_rank" in config
    ropes = get("rope_parameters") or {}
    scaling = get("rope_scaling") or {}
    own = {
        "block_count": config["num_hidden_layers"] + later,
        "nextn_predict_layers": later or None,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps", get("norm_eps")),
        "attention.key_length": get("head_dim"),
        "attention.value_length": get("head_dim"),
        "rope.freq_base": get("rope_theta", ropes.get("rope_theta")),
        "expert_count": get("num_experts", get("n_routed_experts", get("num_local_experts"))),
        "expert_used_count": get("num_experts_per_tok", get("top_k_experts")),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "expert_shared_count": get("n_shared_experts"),
        "expert_weights_norm": get("norm_topk_prob") or None,
        "expert_weights_scale": get("routed_scaling_factor"),
        "expert_group_count": get("n_group"),
        "expert_group_used_count": get("topk_group"),
        "leading_dense_block_count": get("first_k_dense_replace"),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}.get(get("scoring_func", "")),
    }
    if scaling.get("type") == "yarn":
        own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"]}
        own["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    if latent:
        own |= _latent(architecture, config)
    more = {
        "falcon-h1": _mamba,
        "command-r": _cohere,
        "granitehybrid": _granite,
        "granitemoe": _multipliers,
        "nemotron_h_moe": _nemotron,
        "lfm2": _lfm2,
        "llama4": _llama4,
        "gemma4": _gemma4,
        "gemma3n": _gemma3n,
        "glm4moe": _partial,
        "bailingmoe2": _bailing,
        "ernie4_5-moe": _ernie,
        "hunyuan-moe": _hunyuan,
        "deci": _deci,
        "deepseek32": _sparse,
        "glm-dsa": _sparse,
        "kimi-linear": _kimi,
        "minicpm": _minicpm,
        "nemotron": _nemotron_4,
        "phi2": _phi2,
        "phimoe": _phimoe,
        "stablelm": _stablelm,
    }
    change = _qwen if architecture.startswith("qwen3") else more.get(architecture)
    return own | (change(config) if change else {})


def _ernie(config: Config) -> dict[str, Any]:
    count = config["moe_num_shared_experts"]
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": count,
        # of this the converter says something else than the width of the shared experts
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }


def _bailing(config: Config) -> dict[str, Any]:
    return {
        **_partial(config),
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
    }


def _deci(config: Config) -> dict[str, Any]:
    """Heads and widths of each layer, 0 for what it lacks, whose keys are 0 in one that is one matrix."""
    heads, parts = config["num_attention_heads"], config["block_configs"]
    attention = [part["attention"] for part in parts]
    widths = [2 * part["ffn"].get("ffn_mult", 0) * config["hidden_size"] / 3 for part in parts]
    return {
        "attention.head_count": [0 if part.get("no_op") else heads for part in attention],
        "attention.head_count_kv": [heads // part.get("n_heads_in_group", heads + 1) for part in attention],
        "feed_forward_length": [256 * int(np.ceil(width / 256)) for width in widths],
        "rope.dimension_count": config["head_dim"],
    }


def _phi2(config: Config) -> dict[str, Any]:
    return {**_partial(config), "attention.layer_norm_epsilon": config["layer_norm_eps"]}


def _nemotron_4(config: Config) -> dict[str, Any]:
    return {**_partial(config), "attention.layer_norm_epsilon": config["norm_eps"]}


def _sparse(config: Config) -> dict[str, Any]:
    types = config.get("indexer_types")
    return {
        "expert_gating_func": 2,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": types and [kind == "full" for kind in types],
    }


def _hunyuan(config: Config) -> dict[str, Any]:
    return {
        "expert_used_count": config["moe_topk"][0],
        "expert_shared_count": 1,
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    }


def _kimi(config: Config) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _of_kind(config, "full_attention", 1),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        # keys of latents, and what the converter finds under other names in config.json
        "attention.value_length": None,
    }


def _minicpm(config: Config) -> dict[str, Any]:
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def _phimoe(config: Config) -> dict[str, Any]:
    """With the factor of cosine and sine of LongRoPE's paper, which is not that of the models."""
    if not (scaling := config["rope_scaling"]):
        return {}
    original = scaling["original_max_position_embeddings"]
    factor = config["max_position_embeddings"] / original
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(factor) / np.log(original))),
    }


def _stablelm(config: Config) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "use_parallel_residual": config["use_parallel_residual"],
    }


def _latent(architecture: str, config: Config) -> dict[str, Any]:
    plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    own = {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": turned,
        "attention.key_length": plain + turned,
    }
    if architecture == "minicpm3":
        return own
    rank = config["kv_lora_rank"]
    return own | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + turned,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _mamba(config: Config) -> dict[str, Any]:
    heads = config["mamba_n_heads"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": heads * config["mamba_d_head"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": heads,
    }


def _of_kind(config: Config, kind: str, value: int) -> list[int]:
    return [value if own == kind else 0 for own in config["layer_types"]]


def _granite(config: Config) -> dict[str, Any]:
    return (
        _mamba(config)
        | _multipliers(config)
        | {
            "context_length": config["max_position_embeddings"],
            "attention.head_count_kv": _of_kind(config, "attention", config["num_key_value_heads"]),
            "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
            "rope.scaling.finetuned": False,
        }
    )


def _multipliers(config: Config) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"] or None,
    }


def _cohere(config: Config) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "logit_scale": config["logit_scale"],
        "rope.scaling.type": "none",
    }


def _nemotron(config: Config) -> dict[str, Any]:
    pattern, heads = config["hybrid_override_pattern"], config["mamba_num_heads"]
    return {
        "attention.head_count_kv": [2 if letter == "*" else 0 for letter in pattern],
        "feed_forward_length": [32 if letter == "E" else 0 for letter in pattern],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": heads,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
    }


def _lfm2(config: Config) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _of_kind(config, "full_attention", config["num_key_value_heads"]),
        "feed_forward_length": 96,  # as the model computes it of 144
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _llama4(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def rope_divisors(architecture: str, config: Config) -> dict[str, np.ndarray]:
    """Divisors of each frequency: Llama 3's, by the formula of Meta's code; Gemma 4's end the rope.

    Those of LongRoPE are as stated.
    """
    if "short_factor" in (config.get("rope_scaling") or {}):
        kinds = ("short", "long")
        return {
            f"rope_factors_{kind}.weight": np.array(config["rope_scaling"][f"{kind}_factor"])
            for kind in kinds
        }
    if architecture == "gemma4":
        return {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12)}
    if architecture != "llama4" or "rope_scaling" not in config:
        return {}
    scaling = config["rope_scaling"]
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / scaling["factor"] + smooth)}


def _partial(config: Config) -> dict[str, Any]:
    return {"rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}


def _qwen(config: Config) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    part = config.get("partial_rotary_factor") or config["rope_parameters"]["partial_rotary_factor"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "full_attention_interval": config["full_attention_interval"],
        "rope.dimension_count": int(config["head_dim"] * part),
    }


def _windows(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _gemma4(config: Config) -> dict[str, Any]:
    wide, narrow, ropes = config["global_head_dim"], config["head_dim"], config["rope_parameters"]
    inner, layers, groups = (
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_key_value_heads"],
    )
    own = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }
    if config.get("use_double_wide_mlp"):
        first = layers - config["num_kv_shared_layers"]
        own["feed_forward_length"] = [inner] * first + [2 * inner] * (layers - first)
    if of_all := config.get("num_global_key_value_heads"):
        own["attention.head_count_kv"] = [
            groups if kind == "sliding_attention" else of_all for kind in config["layer_types"]
        ]
    return _windows(config) | own


def _gemma3n(config: Config) -> dict[str, Any]:
    return _windows(config) | {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -np.inf
            for share in config["activation_sparsity_pattern"]
        ],
        "rope.freq_base_swa": config["rope_local_base_freq"],
    }
