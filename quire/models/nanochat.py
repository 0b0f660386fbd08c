"""nanochat (Karpathy, 2025): norms without weights, also of queries and keys after they rotate, which they do
the other way round; an MLP without gate.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, plain_mlp, rotate
from quire.program import Builder, Names, Rows, Value


def nanochat(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    def norm(x: Value) -> Value:
        return b.rms_norm(x, None, cfg.norm_eps)

    bias, rope = cfg.flag("attention_bias"), cfg.rope()
    x = norm(embed_tokens(b, cfg, w))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = norm(x)
        q = _exchanged(b, cfg, h, p / "self_attn.q_proj", cfg.num_attention_heads)
        k = _exchanged(b, cfg, h, p / "self_attn.k_proj", cfg.num_key_value_heads)
        v = b.linear(h, p / "self_attn.v_proj", (cfg.num_key_value_heads, cfg.head_dim), bias=bias)
        q, k = rotate(b, q, k, rope)
        h = b.linear(b.attention(norm(q), norm(k), v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, h)
        x = b.add(x, plain_mlp(b, cfg, norm(x), p / "mlp", False, ("fc1", "fc2")))
    logits = b.linear(norm(b.sampled_rows(x)), w / cfg.lm_head, cfg.vocab_size)
    cap = cfg.optional_positive("final_logit_softcapping")
    return b.soft_cap(logits, cap) if cap else logits


def _exchanged(b: Builder, cfg: ModelConfig, h: Value, p: Names, heads: int) -> Value:
    """Return queries or keys with the halves of each head exchanged: so they rotate the other way round."""
    dim, half = cfg.head_dim, cfg.head_dim // 2
    halves = tuple((head * dim + first, half) for head in range(heads) for first in (half, 0))
    bias = cfg.flag("attention_bias")
    return b.linear(h, p, (heads, dim), bias=bias, rows=Rows(heads * dim, halves), part="exchanged")
