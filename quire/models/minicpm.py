"""MiniCPM 1, 2 and 4 (arXiv:2404.06395): Llama's block with scaled embeddings, residuals and logits."""

from __future__ import annotations

import math

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.program import Builder, Names, Value


def minicpm(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias, residual = (
        cfg.flag("attention_bias"),
        cfg.positive("scale_depth") / math.sqrt(cfg.num_hidden_layers),
    )
    x = b.scale(embed_tokens(b, cfg, w), cfg.positive("scale_emb"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, b.scale(h, residual))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, b.scale(gated_mlp(b, cfg, h, p / "mlp"), residual))
    return b.scale(head(b, cfg, x, w), cfg.size("dim_model_base") / cfg.hidden_size)
