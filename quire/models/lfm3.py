"""LFM3 (Liquid AI, 2026): LFM2's layers with norms before and after each part, a window in some of those with
attention, whose heads a sigmoid of each token may gate, and a rope for each kind of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config import FULL, SLIDING, ModelConfig, rope_of_type
from quire.models.layers import embed_tokens, project_qkv, rotate
from quire.models.lfm2 import CONV, gated_convolution, gated_mlp
from quire.program import Builder, Names, Rows, Value
from quire.program.rope import Rope

_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def lfm3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    kinds = cfg.layer_types if cfg.get("layer_types") else [_kind(i) for i in range(cfg.num_hidden_layers)]
    sandwich = cfg.flag("use_sandwich_norm")

    def after(h: Value, name: Names) -> Value:
        return b.rms_norm(h, name, cfg.norm_eps) if sandwich else h

    x = embed_tokens(b, cfg, w)
    for i, kind in enumerate(kinds):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "operator_norm", cfg.norm_eps)
        if kind == CONV:
            h = gated_convolution(b, cfg, h, p / "conv")
        else:
            h = _attention(b, cfg, kind, h, p / "self_attn")
        x = b.add(x, after(h, p / "post_operator_norm"))
        h = b.rms_norm(x, p / "ffn_norm", cfg.norm_eps)
        h = gated_mlp(b, cfg, h, p / "feed_forward", cfg.intermediate_size)
        x = b.add(x, after(h, p / "post_ffn_norm"))
    x = b.rms_norm(b.sampled_rows(x), w / "model.embedding_norm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)


def _kind(layer: int) -> str:
    """Return the type of a layer where none is stated."""
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer > 0 else CONV


def _attention(b: Builder, cfg: ModelConfig, kind: str, h: Value, p: Names) -> Value:
    bias, rope = cfg.flag("attention_bias"), _rope(cfg, kind)
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps)
    q, k = rotate(b, q, k, rope)
    out = b.attention(q, k, v, window=cfg.size("sliding_window") if kind == SLIDING else None)
    if cfg.flag("use_attention_gate"):
        out = b.gated_activation(_gates(b, cfg, h, p / "gate_proj"), out, "sigmoid")
    return b.linear(out, p / "o_proj", cfg.hidden_size, bias=bias)


def _gates(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return the gate of each head, once for each of its numbers."""
    heads, dim = cfg.num_attention_heads, cfg.head_dim
    repeated = tuple((head, 1) for head in range(heads) for _ in range(dim))
    return b.linear(h, p, heads * dim, rows=Rows(heads, repeated), part="repeated")


def _rope(cfg: ModelConfig, kind: str) -> Rope:
    """Return that of a type of layers; an older config has one for both."""
    stated = cfg.get("rope_scaling") or cfg.get("rope_parameters")
    return cfg.rope(rope_of_type(_ROPES if stated is None else stated, kind))
