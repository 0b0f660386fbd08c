"""OLMo 2 (arXiv:2501.00656): norms only after each part, and over the whole width of queries and keys."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, rotate
from quire.models.moe import wide_norm_qkv
from quire.program import Builder, Names, Value


def olmo2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        q, k, v = wide_norm_qkv(b, cfg, x, p / "self_attn", bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
        h = gated_mlp(b, cfg, x, p / "mlp")
        x = b.add(x, b.rms_norm(h, p / "post_feedforward_layernorm", cfg.norm_eps))
    return head(b, cfg, x, w)
