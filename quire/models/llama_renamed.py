"""Families that compute what Llama does, under names of their own: EXAONE 3 and 3.5 (arXiv:2412.04862),
InternLM 2 and 2.5 (2403.17297), whose one matrix has the queries, keys and values of each group.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Rows, Value


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
        q, k, v = _of_groups(b, cfg, h, p / "attention.wqkv")
        q, k = rotate(b, q, k, rope)
        bias = cfg.flag("bias")
        x = b.add(x, b.linear(b.attention(q, k, v), p / "attention.wo", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "ffn_norm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "feed_forward", names=("w1", "w3", "w2")))
    x = b.rms_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, table if tied else w / "output", cfg.vocab_size)


def _of_groups(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> tuple[Value, Value, Value]:
    """Return queries, keys and values from one matrix, which has those of each key/value head together."""
    groups, dim = cfg.num_key_value_heads, cfg.head_dim
    each = cfg.num_attention_heads // groups

    def some(part: str, first: int, count: int) -> Value:
        rows = Rows((each + 2) * dim, ((first * dim, count * dim),))
        return b.linear(h, p, (groups * count, dim), bias=cfg.flag("bias"), rows=rows, part=part)

    return some("query", 0, each), some("key", each, 1), some("value", each + 1, 1)
