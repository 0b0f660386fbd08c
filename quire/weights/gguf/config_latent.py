"""The configuration of families with DeepSeek's attention or router, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.keys import Keys, experts, partial

_SOFTMAX, _SIGMOID = 1, 2
_IN_FILES = 0.1  # files state mscale_all_dim times this


def scores_are_sigmoids(keys: Keys) -> bool:
    """Return True if a router's scores are sigmoids; files that do not say have a bias then."""
    stated = keys.optional_size("expert_gating_func")
    if stated not in (None, _SOFTMAX, _SIGMOID):
        raise ConfigError(f"{keys.metadata.where}: routers of the kind {stated} are not supported")
    return keys.has("exp_probs_b.bias") if stated is None else stated == _SIGMOID


def deepseek(keys: Keys) -> dict[str, Any]:
    """Return the attention and the router of DeepSeek-V2 or V3, by the kind of its scores."""
    own = _latent(keys) | _rope(keys)
    if keys.optional_size("expert_count") is None:
        return own | {"first_k_dense_replace": keys.layers}
    groups = keys.optional_size("expert_group_count")
    limited = not scores_are_sigmoids(keys) and (groups or 1) > 1
    return own | _router(keys) | {"topk_method": "group_limited_greedy"} if limited else own | _router(keys)


def sparse(keys: Keys) -> dict[str, Any]:
    """Return DeepSeek's attention with indexers; which layers have one is stated, or told by the tensors."""
    if not scores_are_sigmoids(keys):
        raise ConfigError(f"{keys.metadata.where}: a softmax router beside an indexer is not supported")
    stated = keys.value("attention.indexer.types") is not None
    tensors = [f"blk.{layer}.indexer.attn_q_b.weight" in keys.tensors for layer in range(keys.layers)]
    have = keys.of_layers("attention.indexer.types") if stated else tensors
    return (
        _latent(keys)
        | _rope(keys)
        | _router(keys)
        | {
            "index_n_heads": keys.size("attention.indexer.head_count"),
            "index_head_dim": keys.size("attention.indexer.key_length"),
            "index_topk": keys.size("attention.indexer.top_k"),
            "indexer_types": ["full" if own else "shared" for own in have],
        }
    )


def kimi_linear(keys: Keys) -> dict[str, Any]:
    """Return the delta rules, which are the layers without heads of keys, and have as many as the others."""
    groups = keys.of_layers("attention.head_count_kv")
    return (
        _latent(keys)
        | _router(keys)
        | {
            "layer_types": ["full_attention" if count else "linear_attention" for count in groups],
            "linear_head_dim": keys.size("kda.head_dim"),
            "linear_num_heads": keys.heads,
            "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
            "norm_topk_prob": keys.flag("expert_weights_norm") is not False,
        }
    )


def minicpm3(keys: Keys) -> dict[str, Any]:
    return _latent(keys)  # files do not state its factors, which are those of the only model


def glm4_moe(keys: Keys) -> dict[str, Any]:
    return _router(keys) | partial(keys) | {"use_qk_norm": keys.has("attn_q_norm.weight")}


def bailing2(keys: Keys) -> dict[str, Any]:
    router = _router(keys) | partial(keys)
    return router | {
        "num_shared_experts": router["n_shared_experts"],
        "use_qk_norm": keys.has("attn_q_norm.weight"),
        "use_qkv_bias": keys.has("attn_qkv.bias"),
    }


def _latent(keys: Keys) -> dict[str, Any]:
    """Return the sizes of latent attention; older files state a head's where newer state the latent's."""
    heads = keys.heads
    width = keys.optional_size("attention.key_length_mla") or keys.size("attention.key_length")
    values = keys.optional_size("attention.value_length_mla") or keys.optional_size("attention.value_length")
    turned = keys.size("rope.dimension_count")
    if width <= turned:
        raise ConfigError(f"{keys.metadata.where}: {turned} of the {width} numbers of a head are rotated")
    return {
        "num_key_value_heads": heads,
        "head_dim": None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "q_lora_rank": keys.optional_size("attention.q_lora_rank"),
        "qk_nope_head_dim": width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
    }


def _rope(keys: Keys) -> dict[str, Any]:
    """Return YaRN as DeepSeek has it, with the factor of scores."""
    factor = keys.number("rope.scaling.factor")
    if keys.text("rope.scaling.type") != "yarn" or not factor:
        return {}
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow") or 1.0,
    }
    if stated := keys.number("rope.scaling.yarn_log_multiplier"):
        of_all = round(stated / _IN_FILES, 6)
        scaling |= {"mscale": of_all, "mscale_all_dim": of_all}
    return {"rope_scaling": scaling}


def _router(keys: Keys) -> dict[str, Any]:
    return experts(keys) | {
        "n_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.metadata.size(f"{keys.prefix}.leading_dense_block_count", 0, least=0),
        "norm_topk_prob": bool(keys.flag("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "n_group": keys.optional_size("expert_group_count") or 1,
        "topk_group": keys.optional_size("expert_group_used_count") or 1,
    }
