"""EXAONE 4 (arXiv:2507.11407): norms after each part and of each head, positions only in window layers."""

from __future__ import annotations

from quire.models.config import SLIDING, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.program import Builder, Names, Value


def exaone4(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = attention(b, cfg, i, x, p / "self_attn")
        x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
        h = gated_mlp(b, cfg, x, p / "mlp")
        x = b.add(x, b.rms_norm(h, p / "post_feedforward_layernorm", cfg.norm_eps))
    return head(b, cfg, x, w)


def attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    """Attend, with positions only in layers with a window, or in all if there is none."""
    q, k, v = project_qkv(b, cfg, h, p)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps)
    if cfg.sliding_window is None or cfg.layer_types[layer] == SLIDING:
        q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v, window=cfg.window(layer)), p / "o_proj", cfg.hidden_size)
