"""Granite 3 (IBM): Llama's block with four constant multipliers."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.program import Builder, Names, Value


def granite(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    residual = cfg.number("residual_multiplier")
    x = b.scale(embed_tokens(b, cfg, w), cfg.number("embedding_multiplier"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v, scale=cfg.number("attention_multiplier"))
        h = b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, b.scale(h, residual))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        h = gated_mlp(b, cfg, h, p / "mlp", bias=cfg.flag("mlp_bias"))
        x = b.add(x, b.scale(h, residual))
    return b.scale(head(b, cfg, x, w), 1.0 / cfg.positive("logits_scaling"))
