"""Families that compute what Llama does, under names of their own: EXAONE 3 and 3.5 (arXiv:2412.04862),
InternLM 2 and 2.5 (2403.17297), whose one matrix has the queries, keys and values of each group.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import gated_mlp, grouped_qkv, project_qkv, rotate
from quire.program import Builder, Names, Value


def exaone(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    table, tied, rope = w / "transformer.wte", cfg.tie_word_embeddings, cfg.rope()
    x = b.embed(table, cfg.vocab_size, cfg.hidden_size, tied)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.rms_norm(x, p / "ln_1", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "attn.attention")
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "attn.attention.out_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "ln_2", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp", names=("c_fc_0", "c_fc_1", "c_proj")))
    x = b.rms_norm(b.sampled_rows(x), w / "transformer.ln_f", cfg.norm_eps)
    return b.linear(x, table if tied else w / "lm_head", cfg.vocab_size)


def internlm2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    table, tied, rope = w / "model.tok_embeddings", cfg.tie_word_embeddings, cfg.rope()
    x = b.embed(table, cfg.vocab_size, cfg.hidden_size, tied)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "attention_norm", cfg.norm_eps)
        q, k, v = grouped_qkv(b, cfg, h, p / "attention.wqkv", cfg.flag("bias"))
        q, k = rotate(b, q, k, rope)
        bias = cfg.flag("bias")
        x = b.add(x, b.linear(b.attention(q, k, v), p / "attention.wo", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "ffn_norm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "feed_forward", names=("w1", "w3", "w2")))
    x = b.rms_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, table if tied else w / "output", cfg.vocab_size)
