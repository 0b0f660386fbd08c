"""The configuration of families with LayerNorm, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from quire.weights.gguf.config_gemma import window
from quire.weights.gguf.keys import Keys, partial


def cohere(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
    }


def cohere2(keys: Keys) -> dict[str, Any]:
    return {**window(keys), **cohere(keys)}


def starcoder2(keys: Keys) -> dict[str, Any]:
    window = keys.optional_size("attention.sliding_window") or 4096  # as published; few files state it
    eps, biased = keys.number("attention.layer_norm_epsilon"), keys.has("attn_q.bias")
    return {"norm_epsilon": eps, "use_bias": biased, "sliding_window": window}


def stablelm(keys: Keys) -> dict[str, Any]:
    return partial(keys) | {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "use_qkv_bias": keys.has("attn_q.bias"),
        "qk_layernorm": keys.has("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("ffn_norm.weight"),
    }


def gpt2(keys: Keys) -> dict[str, Any]:
    eps = keys.number("attention.layer_norm_epsilon")
    return {"layer_norm_epsilon": eps, "n_inner": keys.size("feed_forward_length")}


def phi2(keys: Keys) -> dict[str, Any]:
    return {**partial(keys), "layer_norm_eps": keys.number("attention.layer_norm_epsilon")}


def nemotron(keys: Keys) -> dict[str, Any]:
    eps, biased = keys.number("attention.layer_norm_epsilon"), keys.has("ffn_up.bias")
    return {**partial(keys), "norm_eps": eps, "mlp_bias": biased}
