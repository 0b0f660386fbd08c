"""GPT-NeoX (arXiv:2204.06745) and Pythia (2304.01373): LayerNorm and biases, queries, keys and values of
each head in one matrix, a part of each head rotated, attention and an MLP without gate in parallel or not.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import grouped_qkv, plain_mlp, rotate
from quire.program import Builder, Names, Value


def gpt_neox(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    parallel, tied, vocab = cfg.flag("use_parallel_residual"), cfg.tie_word_embeddings, cfg.vocab_size
    table = w / "gpt_neox.embed_in"
    x = b.embed(table, vocab, cfg.hidden_size, tied)
    for i in range(cfg.num_hidden_layers):
        p = w / f"gpt_neox.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps)
        after = b.add(x, _attention(b, cfg, h, p / "attention"))
        h = b.layer_norm(x if parallel else after, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(after, plain_mlp(b, cfg, h, p / "mlp", True, ("dense_h_to_4h", "dense_4h_to_h")))
    x = b.layer_norm(b.sampled_rows(x), w / "gpt_neox.final_layer_norm", cfg.norm_eps)
    return b.linear(x, table if tied else w / "embed_out", vocab)


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = grouped_qkv(b, cfg, h, p / "query_key_value", bias)
    q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v), p / "dense", cfg.hidden_size, bias=bias)


def unused(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of masks that older checkpoints have."""
    return tuple(f"*.attention.{name}" for name in ("bias", "masked_bias"))
