"""Gemma 2 (arXiv:2408.00118) and Gemma 3, text (2503.19786): norms before and after each part, norm
weights stored minus one, scaled embeddings, sliding windows between full layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.models.blocks import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.config import SLIDING, ModelConfig
from quire.program import Builder, Names, Value
from quire.program.rope import Rope, rope_from_config


def gemma(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    def norm(x: Value, name: Names) -> Value:
        return b.rms_norm(x, name, cfg.norm_eps, offset=1.0)

    x = b.scale(embed_tokens(b, cfg, w), math.sqrt(cfg.hidden_size))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = _attention(b, cfg, i, norm(x, p / "input_layernorm"), p / "self_attn")
        x = b.add(x, norm(h, p / "post_attention_layernorm"))
        h = gated_mlp(b, cfg, norm(x, p / "pre_feedforward_layernorm"), p / "mlp")
        x = b.add(x, norm(h, p / "post_feedforward_layernorm"))
    logits = head(b, cfg, x, w, norm_offset=1.0)
    cap = cfg.positive("final_logit_softcapping")
    return b.soft_cap(logits, cap) if cap else logits


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    if cfg["model_type"] == "gemma3_text":
        q = b.rms_norm(q, p / "q_norm", cfg.norm_eps, offset=1.0)
        k = b.rms_norm(k, p / "k_norm", cfg.norm_eps, offset=1.0)
    q, k = rotate(b, q, k, _rope(cfg, layer))
    scale = (cfg.positive("query_pre_attn_scalar") or cfg.head_dim) ** -0.5
    cap = cfg.positive("attn_logit_softcapping")
    h = b.attention(q, k, v, scale=scale, window=cfg.window(layer), softcap=cap)
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _rope(cfg: ModelConfig, layer: int) -> Rope:
    """Gemma 3's window layers rotate by their own, unscaled base."""
    kind = cfg.layer_types[layer]
    local = cfg.positive("rope_local_base_freq")
    stated = cfg.get("rope_parameters")
    if local and kind == SLIDING and not (isinstance(stated, Mapping) and kind in stated):
        return rope_from_config(None, dim=cfg.head_dim, theta=local, max_position=cfg.max_position_embeddings)
    return cfg.rope(kind)
