"""The configuration of Gemma 2 to 4 from the metadata of a GGUF file."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.weights.gguf.keys import Keys, experts

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOT_ROTATED = 1e20  # divisors of frequencies above it: an angle of nearly 0 at any position


def window(keys: Keys) -> dict[str, Any]:
    """Return the sliding window, and the layers that have one, as a list or as a period.

    A file that states no window has that of its family.
    """
    size, pattern = (
        keys.optional_size("attention.sliding_window"),
        keys.value("attention.sliding_window_pattern"),
    )
    own = {} if size is None else {"sliding_window": size}
    if isinstance(pattern, np.ndarray):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
        return {**own, "layer_types": kinds}
    return {**own, "sliding_window_pattern": pattern}


def _gemma(keys: Keys, num_layers_27b: int) -> dict[str, Any]:
    # Files do not state what queries are divided by: the 27B takes the width by the heads.
    largest = keys.size("block_count") == num_layers_27b
    scalar = _per_head(keys) if largest else keys.head_dim
    return {**window(keys), "query_pre_attn_scalar": scalar}


def gemma2(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, 46),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping"),
    }


def gemma3(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, 62),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa"),
    }


def embedding_gemma(keys: Keys) -> dict[str, Any]:
    """Return the fields of EmbeddingGemma, the layers of Gemma 3 with attention both ways."""
    keys.size("pooling_type")
    return {**gemma3(keys), "use_bidirectional_attention": True}


def _per_head(keys: Keys) -> int:
    return keys.size("embedding_length") // keys.size("attention.head_count")


def gemma3n(keys: Keys) -> dict[str, Any]:
    """Return the streams, inputs of layers and sparse activations of Gemma 3n."""
    sparsity = keys.metadata.numbers(f"{keys.prefix}.activation_sparsity_scale")
    left = keys.rows("blk.0.laurel_l.weight")
    return {
        **_layers(keys),
        **_layer_inputs(keys),
        "intermediate_size": keys.of_layers("feed_forward_length"),
        "altup_num_inputs": keys.size("altup.num_inputs"),
        "altup_active_idx": keys.metadata.size(f"{keys.prefix}.altup.active_idx", 0, least=0),
        "altup_correct_scale": keys.has("altup_correct_scale.weight"),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in sparsity] or None,
        "laurel_rank": left,
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa"),
    }


def gemma4(keys: Keys) -> dict[str, Any]:
    """Return the two kinds of layers of Gemma 4, with inputs for each layer or experts where it has them."""
    widths = keys.of_layers("feed_forward_length")
    own: dict[str, Any] = {
        **_layers(keys),
        **_layer_inputs(keys),
        **_heads(keys),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_parameters": _ropes(keys),
    }
    if keys.optional_size("expert_count"):
        found = experts(keys)
        chosen, inner = found["num_experts_per_tok"], keys.size("expert_feed_forward_length")
        own |= {**found, "enable_moe_block": True, "top_k_experts": chosen, "moe_intermediate_size": inner}
    return own


def _layers(keys: Keys) -> dict[str, Any]:
    """Return the window, the layers that have it, and how many of the last layers share keys and values."""
    shared = keys.metadata.size(f"{keys.prefix}.attention.shared_kv_layers", 0, least=0)
    return {**window(keys), "num_kv_shared_layers": shared}


def _layer_inputs(keys: Keys) -> dict[str, Any]:
    size = keys.metadata.size(f"{keys.prefix}.embedding_length_per_layer_input", 0, least=0)
    rows = keys.rows("per_layer_token_embd.weight")
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": rows}


def _heads(keys: Keys) -> dict[str, Any]:
    """Return the heads of layers with a window and of those without, which may have values that are keys."""
    groups, slides = keys.of_layers("attention.head_count_kv"), _slides(keys)
    of_window = {count for count, sliding in zip(groups, slides, strict=True) if sliding}
    of_full = {count for count, sliding in zip(groups, slides, strict=True) if not sliding}
    if len(of_window) > 1 or len(of_full) > 1:
        raise ConfigError(
            f"{keys.metadata.where}: layers of one kind have different numbers of heads of keys"
        )
    last = keys.layers - keys.metadata.size(f"{keys.prefix}.attention.shared_kv_layers", 0, least=0)
    same = any(
        f"blk.{i}.attn_k.weight" in keys.tensors and f"blk.{i}.attn_v.weight" not in keys.tensors
        for i in range(last)
    )
    both = (of_window or of_full, of_full or of_window)
    return {
        "head_dim": keys.size("attention.key_length_swa", keys.head_dim),
        "global_head_dim": keys.head_dim,
        "num_key_value_heads": max(both[0]),
        "num_global_key_value_heads": max(both[1]),
        "attention_k_eq_v": same,
    }


def _slides(keys: Keys) -> list[bool]:
    """Return for each layer whether it has the window. Gemma 4's last never has."""
    kinds = window(keys).get("layer_types")
    if kinds is None or len(kinds) < keys.layers:
        raise ConfigError(f"{keys.metadata.where}: the file does not list the layers that have a window")
    return [kind == _SLIDING for kind in kinds[: keys.layers]]


def _ropes(keys: Keys) -> dict[str, Any]:
    """Return the rope of layers without a window, in which divisors of frequencies end what is rotated."""
    factors = keys.factors("rope_freqs.weight")
    turned = sum(factor < _NOT_ROTATED for factor in factors) / len(factors) if factors else 1.0
    if factors and any(factor not in (1.0,) and factor < _NOT_ROTATED for factor in factors):
        raise ConfigError(f"{keys.metadata.where}: divisors of rope frequencies are not those of Gemma 4")
    full = {"rope_type": "proportional", "partial_rotary_factor": turned}
    narrow = keys.size("attention.key_length_swa", keys.head_dim)
    if keys.size("rope.dimension_count_swa", narrow) != narrow:
        raise ConfigError(
            f"{keys.metadata.where}: a rope of part of a head is not supported in layers with a window"
        )
    return {
        _FULL: {**full, "rope_theta": keys.number("rope.freq_base")},
        _SLIDING: {"rope_theta": keys.number("rope.freq_base_swa")},
    }
