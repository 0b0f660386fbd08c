"""Falcon (arXiv:2311.16867), 7B to 180B: LayerNorm, one matrix of queries, keys and values, attention and an
MLP without gate beside each other, on one norm or one each, or after each other.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import ModelConfig
from quire.models.layers import grouped_qkv, plain_mlp, rotate
from quire.program import Builder, Names, Value


def falcon(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    table, tied = w / "transformer.word_embeddings", cfg.tie_word_embeddings
    newer, bias = cfg.flag("new_decoder_architecture"), cfg.flag("bias")
    apart = newer and (cfg.optional_size("num_ln_in_parallel_attn") or 2) == 2
    x = b.embed(table, cfg.vocab_size, cfg.hidden_size, tied)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.layer_norm(x, p / ("ln_attn" if apart else "input_layernorm"), cfg.norm_eps)
        after = b.add(x, _attention(b, cfg, h, p / "self_attention"))
        if apart:
            h = b.layer_norm(x, p / "ln_mlp", cfg.norm_eps)
        elif not newer and not cfg.flag("parallel_attn"):
            h = b.layer_norm(after, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(after, plain_mlp(b, cfg, h, p / "mlp", bias, ("dense_h_to_4h", "dense_4h_to_h")))
    x = b.layer_norm(b.sampled_rows(x), w / "transformer.ln_f", cfg.norm_eps)
    return b.linear(x, table if tied else w / "lm_head", cfg.vocab_size)


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    bias = cfg.flag("bias")
    q, k, v = grouped_qkv(b, _with_key_heads(cfg), h, p / "query_key_value", bias)
    q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v), p / "dense", cfg.hidden_size, bias=bias)


def _with_key_heads(cfg: ModelConfig) -> ModelConfig:
    """Return the config with the heads of keys; models before the 40B have one, or as many as of queries."""
    if cfg.flag("new_decoder_architecture"):
        return cfg
    return replace(cfg, num_key_value_heads=1 if cfg.flag("multi_query") else cfg.num_attention_heads)
