"""GLM-4 (0414, arXiv:2406.12793): norms before and after each part, half of each head rotated."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, packed_gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value


def glm4(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=cfg.flag("attention_bias"))
        q, k = rotate(b, q, k, cfg.rope(interleaved=True))
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size)
        x = b.add(x, b.rms_norm(h, p / "post_self_attn_layernorm", cfg.norm_eps))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        h = packed_gated_mlp(b, cfg, h, p / "mlp")
        x = b.add(x, b.rms_norm(h, p / "post_mlp_layernorm", cfg.norm_eps))
    return head(b, cfg, x, w)
