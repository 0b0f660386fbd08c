"""Gemma 1 (arXiv:2403.08295), 2 (2408.00118) and 3 (2503.19786): norm weights stored minus one and scaled
embeddings; from 2 on norms before and after each part, and sliding windows between full layers. VaultGemma
(2510.15001) is Gemma 2 without the norms after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.vision import Vision
from quire.models.config import FULL, SLIDING, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.pooling import attend_both
from quire.models.tower import place_images
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

Attend = Callable[[Builder, ModelConfig, int, Value, Names], Value]


def gemma(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    if cfg.hidden_act == "gelu":  # what the first releases say, and were not trained with
        cfg = replace(cfg, hidden_act="gelu_pytorch_tanh")
    bias = cfg.flag("attention_bias")
    x = b.scale(embed_tokens(b, cfg, w), math.sqrt(cfg.hidden_size))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps, offset=1.0)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, h)
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps, offset=1.0)
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w, norm_offset=1.0)


def gemma2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, _attention2)


def vaultgemma(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, _attention2, after=False)


def gemma3(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, _attention3, vision)


def _decoder(
    b: Builder,
    cfg: ModelConfig,
    w: Names,
    attend: Attend,
    vision: Vision | None = None,
    after: bool = True,
) -> Value:
    def norm(x: Value, name: Names) -> Value:
        return b.rms_norm(x, name, cfg.norm_eps, offset=1.0)

    x = b.scale(embed_tokens(b, cfg, w), math.sqrt(cfg.hidden_size))
    if vision is not None:
        x = place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = attend(b, cfg, i, norm(x, p / "input_layernorm"), p / "self_attn")
        x = b.add(x, norm(h, p / "post_attention_layernorm") if after else h)
        h = gated_mlp(b, cfg, norm(x, p / "pre_feedforward_layernorm"), p / "mlp")
        x = b.add(x, norm(h, p / "post_feedforward_layernorm") if after else h)
    logits = head(b, cfg, x, w, norm_offset=1.0)
    cap = cfg.optional_positive("final_logit_softcapping")
    return b.soft_cap(logits, cap) if cap else logits


def _attention2(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    q, k = rotate(b, q, k, cfg.rope())
    scale, cap = _scale(cfg), cfg.optional_positive("attn_logit_softcapping")
    h = b.attention(q, k, v, scale=scale, window=cfg.window(layer), softcap=cap)
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _attention3(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps, offset=1.0)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps, offset=1.0)
    q, k = rotate(b, q, k, rope_of_type(cfg, cfg.layer_types[layer]))
    window = cfg.window(layer)
    if cfg.flag("use_bidirectional_attention"):  # EmbeddingGemma (arXiv:2509.20354)
        h = attend_both(b, q, k, v, window // 2 if window else None, _scale(cfg))
    else:
        h = b.attention(q, k, v, scale=_scale(cfg), window=window)
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _scale(cfg: ModelConfig) -> float:
    return cfg.positive("query_pre_attn_scalar") ** -0.5


def rope_of_type(cfg: ModelConfig, kind: str, local_base: str = "rope_local_base_freq") -> Rope:
    """Read rope_parameters by layer type, or the older rope_scaling, which is only for full layers.

    `local_base` is the field with the base of window layers.
    """
    stated = cfg.get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or (stated and not stated.keys() & {FULL, SLIDING}):
        raise ConfigError("config.json: rope_parameters is not an object of layer types")
    if kind == SLIDING:
        return cfg.rope(_object(stated.get(SLIDING)), base=local_base)
    return cfg.rope({**_object(stated.get(FULL)), **_object(cfg.get("rope_scaling"))})


def _object(stated: Any) -> Mapping[str, Any]:
    if stated is not None and not isinstance(stated, Mapping):
        raise ConfigError(f"config.json: rope parameters {quoted(stated)} are not an object")
    return stated or {}
