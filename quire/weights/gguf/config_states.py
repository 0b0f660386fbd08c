"""The configuration of families with states beside attention, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.weights.gguf.keys import Keys, experts

_FULL, _LINEAR = "full_attention", "linear_attention"


def qwen3_5(keys: Keys) -> dict[str, Any]:
    """Return the delta nets of Qwen3.5 and Qwen3-Next, and their experts if they have any."""
    heads, width = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if width % heads:
        raise ConfigError(f"{keys.metadata.where}: {heads} heads cannot share {width} values evenly")
    own = {
        "layer_types": _kinds(keys),
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width // heads,
        "partial_rotary_factor": keys.rotated / keys.head_dim,
    }
    if keys.optional_size("expert_count") is None:
        return own
    inner, shared = keys.size("expert_feed_forward_length"), keys.size("expert_shared_feed_forward_length")
    return own | experts(keys) | {"moe_intermediate_size": inner, "shared_expert_intermediate_size": shared}


def qwen3_next(keys: Keys) -> dict[str, Any]:
    normed = keys.flag("expert_weights_norm")
    return qwen3_5(keys) | {"norm_topk_prob": normed is not False}


def _kinds(keys: Keys) -> list[str]:
    """Return the type of each layer: listed, or every so many with attention."""
    if isinstance(keys.value("attention.recurrent_layers"), np.ndarray):
        return [_LINEAR if linear else _FULL for linear in keys.of_layers("attention.recurrent_layers")]
    every = keys.size("full_attention_interval", 4)
    return [_LINEAR if (layer + 1) % every else _FULL for layer in range(keys.layers)]


def lfm2(keys: Keys) -> dict[str, Any]:
    """Return the convolutions, which are the layers without heads of keys."""
    groups = keys.of_layers("attention.head_count_kv")
    return {
        "layer_types": [_FULL if count else "conv" for count in groups],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "conv_bias": keys.has("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,  # the width in the file is that of its matrices
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
    }


def lfm2_moe(keys: Keys) -> dict[str, Any]:
    """Return the same with the experts of all but the first layers."""
    normed = keys.flag("expert_weights_norm")
    return (
        lfm2(keys)
        | experts(keys)
        | {
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "num_dense_layers": keys.metadata.size(f"{keys.prefix}.leading_dense_block_count", 0, least=0),
            "use_expert_bias": keys.has("exp_probs_b.bias"),
            "norm_topk_prob": normed is not False,
            "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        }
    )


def granite(keys: Keys) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "attention_multiplier": keys.number("attention.scale") or keys.head_dim**-0.5,
        "logits_scaling": keys.number("logit_scale"),
    }


def granite_moe(keys: Keys) -> dict[str, Any]:
    shared = keys.rows("blk.0.ffn_gate_shexp.weight") or 0
    return granite(keys) | experts(keys) | {"shared_intermediate_size": shared}


def granite_hybrid(keys: Keys) -> dict[str, Any]:
    """Return the mixers, which are the layers without heads of keys, and the MLP beside the experts."""
    groups = keys.of_layers("attention.head_count_kv")
    dense = keys.rows("blk.0.ffn_gate.weight")
    own = (
        granite(keys)
        | _mamba(keys)
        | {
            "layer_types": ["attention" if count else "mamba" for count in groups],
            "mamba_expand": keys.size("ssm.inner_size") // keys.size("embedding_length"),
            "position_embedding_type": None if keys.flag("rope.scaling.finetuned") is False else "rope",
            "shared_intermediate_size": dense or keys.size("expert_shared_feed_forward_length"),
            "num_local_experts": 0,
        }
    )
    return own | experts(keys) if keys.optional_size("expert_count") else own


def falcon_h1(keys: Keys) -> dict[str, Any]:
    """Return the mixers. All multipliers but those of norms are in the weights of a file."""
    return _mamba(keys) | {
        "mamba_d_ssm": keys.size("ssm.inner_size"),
        "mamba_rms_norm": keys.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba(keys: Keys) -> dict[str, Any]:
    """Return the sizes of mixers under the names of most families."""
    heads = keys.size("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": keys.size("ssm.inner_size") // heads,
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has("ssm_in.bias"),
    }


def nemotron_h(keys: Keys) -> dict[str, Any]:
    """Return the kinds of layers, by what each has, and their sizes."""
    heads = keys.size("ssm.time_step_rank")
    own = {
        "layers_block_type": _blocks(keys),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.size("ssm.inner_size") // heads,
        "ssm_state_size": keys.size("ssm.state_size"),
        "n_groups": keys.size("ssm.group_count"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "use_conv_bias": keys.has("ssm_conv1d.bias"),
        "use_bias": keys.has("ssm_in.bias"),
        "mlp_bias": keys.has("ffn_up.bias"),
    }
    if keys.optional_size("expert_count") is None:
        return own
    return (
        own
        | experts(keys)
        | {
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
            "moe_latent_size": keys.optional_size("moe_latent_size"),
            "norm_topk_prob": bool(keys.flag("expert_weights_norm")),
            "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
            "n_group": keys.optional_size("expert_group_count") or 1,
            "topk_group": keys.optional_size("expert_group_used_count") or 1,
        }
    )


def _blocks(keys: Keys) -> list[str]:
    groups, widths = keys.of_layers("attention.head_count_kv"), keys.of_layers("feed_forward_length")
    feeds = "moe" if keys.optional_size("expert_count") else "mlp"
    return [
        "full_attention" if group else feeds if width else _LINEAR
        for group, width in zip(groups, widths, strict=True)
    ]
