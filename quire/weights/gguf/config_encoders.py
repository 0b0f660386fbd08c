"""The configuration of encoders from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.keys import Keys


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


def _eps(keys: Keys) -> float | None:
    return keys.number("attention.layer_norm_epsilon")


def _segments(keys: Keys) -> int:
    """Return the number of segments. Raises ConfigError if the file states another than it has."""
    shape = keys.tensors["token_types.weight"].shape
    count = shape[0] if len(shape) > 1 else 1
    key = "tokenizer.ggml.token_type_count"
    if keys.metadata.size(key, count) != count:
        raise ConfigError(f"{keys.metadata.where}: {key} is not that of token_types.weight, {count}")
    return count
