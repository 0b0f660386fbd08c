"""Cohere 2 (Command R7B): attention and MLP in parallel on one LayerNorm, positions only in the
window layers, scaled logits.
"""

from __future__ import annotations

from quire.models.config import SLIDING, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value


def cohere2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps, bias=False)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        if cfg.layer_types[i] == SLIDING:
            q, k = rotate(b, q, k, cfg.rope(interleaved=True))
        a = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(a, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
    x = b.layer_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps, bias=False)
    return b.scale(b.linear(x, w / cfg.lm_head, cfg.vocab_size), cfg.number("logit_scale"))
