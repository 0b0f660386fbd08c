"""MiMo-V2-Flash (Xiaomi, arXiv:2601.02780): most layers have a window, sinks and twice the key heads; heads
of values are smaller than those of keys, of which a part is rotated; DeepSeek-V3's experts, none shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config import FULL, MAX_HEAD_DIM, SLIDING, Fields, ModelConfig, rope_of_type
from quire.models.deepseek import experts_or_mlp
from quire.models.layers import embed_tokens, head, rotate
from quire.models.moe import biased_routing
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

_PART = 0.334  # of each head is rotated
_ROPES: Mapping[str, Mapping[str, Any]] = {FULL: {"rope_theta": 5e6}, SLIDING: {"rope_theta": 1e4}}


def slides(fields: Fields, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def mimo_v2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, _attention(b, cfg, i, h, p / "self_attn"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, experts_or_mlp(b, cfg, i, h, p / "mlp", biased_routing))
    return head(b, cfg, x, w)


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    kind, bias = cfg.layer_types[layer], cfg.flag("attention_bias")
    groups = cfg.num_key_value_heads * (2 if kind == SLIDING else 1)
    sinks = p / "attention_sink_bias" if kind == SLIDING else None
    q = b.linear(h, p / "q_proj", (cfg.num_attention_heads, cfg.head_dim), bias=bias)
    k = b.linear(h, p / "k_proj", (groups, cfg.head_dim), bias=bias)
    v = b.linear(h, p / "v_proj", (groups, cfg.size("v_head_dim", MAX_HEAD_DIM)), bias=bias)
    if cfg.get("attention_value_scale") is not None:
        v = b.scale(v, cfg.number("attention_value_scale"))
    q, k = rotate(b, q, k, _rope(cfg, kind))
    window = _window(cfg)
    h = b.attention(q, k, v, window=window if kind == SLIDING else None, sinks=sinks)
    return b.linear(h, p / "o_proj", cfg.hidden_size)


def _window(cfg: ModelConfig) -> int:
    """Return the number of positions that a token sees: sliding_window_size is that of those before it."""
    window, before = cfg.size("sliding_window"), cfg.optional_size("sliding_window_size")
    return window if before is None else before + 1


def _rope(cfg: ModelConfig, kind: str) -> Rope:
    """Read rope_parameters by layer type."""
    stated = cfg.get("rope_parameters")
    own = rope_of_type(_ROPES if stated is None else stated, kind)
    scaled = (own.get("rope_type") or own.get("type") or "default") != "default"
    part = Fields({"part": own.get("partial_rotary_factor", 1.0 if scaled else _PART)}).number("part", 0, 1)
    return cfg.rope(own, dim=int(cfg.head_dim * part))
