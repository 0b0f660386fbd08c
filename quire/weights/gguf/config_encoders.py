"""The configuration of encoders from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.config_gemma import window
from quire.weights.gguf.keys import Keys
from quire.weights.gguf.pooling import ranks


def bert(keys: Keys) -> dict[str, Any]:
    """Return what BERT has of its own.

    RoBERTa's table of positions begins in files with that of the first token, as BERT's does.
    """
    return {"layer_norm_eps": _eps(keys), "type_vocab_size": _segments(keys)}


def distilbert(keys: Keys) -> dict[str, Any]:
    return {
        "dim": keys.size("embedding_length"),
        "hidden_dim": keys.size("feed_forward_length"),
        "n_layers": keys.layers,
        "n_heads": keys.size("attention.head_count"),
    }


def nomic_bert(keys: Keys) -> dict[str, Any]:
    """Return what NomicBERT has of its own; the context in a file is the length that it was trained for."""
    return {
        "layer_norm_epsilon": _eps(keys),
        "type_vocab_size": _segments(keys),
        "n_inner": keys.size("feed_forward_length"),
        "activation_function": "swiglu",
        "max_trained_positions": keys.size("context_length"),
        "rotary_emb_base": keys.number("rope.freq_base"),
        "qkv_proj_bias": keys.has("attn_qkv.bias"),
        "mlp_fc1_bias": keys.has("ffn_up.bias"),
        "mlp_fc2_bias": keys.has("ffn_down.bias"),
    }


def modernbert(keys: Keys) -> dict[str, Any]:
    """Return what ModernBERT has of its own. Raises ConfigError for scores: files do not say of what."""
    if ranks(keys):
        problem = "scores of modern-bert are not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}", "take the safetensors version of the model")
    near = window(keys)
    kinds = near.get("layer_types") if near.get("sliding_window") else ["full_attention"] * keys.layers
    return {
        "norm_eps": _eps(keys),
        "hidden_activation": keys.text("hidden_activation"),
        "local_attention": near.get("sliding_window"),
        "global_attn_every_n_layers": near.get("sliding_window_pattern"),
        "layer_types": None if kinds is None else kinds[: keys.layers],
        "global_rope_theta": keys.number("rope.freq_base"),
        "local_rope_theta": keys.number("rope.freq_base_swa"),
        "norm_bias": "output_norm.bias" in keys.tensors,
        "attention_bias": keys.has("attn_output.bias"),
        "mlp_bias": keys.has("ffn_down.bias"),
    }


def _eps(keys: Keys) -> float | None:
    return keys.number("attention.layer_norm_epsilon")


def _segments(keys: Keys) -> int:
    """Return the number of segments. Raises ConfigError if the file states another than it has."""
    if (table := keys.tensors.get("token_types.weight")) is None:
        raise ConfigError(f"{keys.metadata.where}: has no token_types.weight", "is the file complete?")
    shape = table.shape
    count = shape[0] if len(shape) > 1 else 1
    key = "tokenizer.ggml.token_type_count"
    if keys.metadata.size(key, count) != count:
        raise ConfigError(f"{keys.metadata.where}: {key} is not that of token_types.weight, {count}")
    return count
