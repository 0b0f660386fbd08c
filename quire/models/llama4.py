"""Llama 4, text: layers with rope, which attend within chunks of positions, and every fourth without rope
over the whole context, with queries that grow with the position; one expert of each token beside a shared
one.
"""

from __future__ import annotations

from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import fused_experts
from quire.models.tower import place_images
from quire.program import Builder, Names, Value
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

CHUNKED = "chunked_attention"


def llama4(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    rope, x = cfg.rope(interleaved=True), embed_tokens(b, cfg, w)
    x = x if vision is None else place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, _attention(b, cfg, i, h, p / "self_attn", rope))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        if _is_sparse(cfg, i):
            x = b.add(x, _experts(b, cfg, h, p / "feed_forward"))
        else:
            x = b.add(x, gated_mlp(b, cfg, h, p / "feed_forward", width=cfg.size("intermediate_size_mlp")))
    return head(b, cfg, x, w)


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names, rope: Rope) -> Value:
    bias, rotates = cfg.flag("attention_bias"), _rotates(cfg, layer)
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    if rotates:
        q, k = rotate(b, q, k, rope)
        if cfg.flag("use_qk_norm"):
            q, k = b.rms_norm(q, None, cfg.norm_eps), b.rms_norm(k, None, cfg.norm_eps)
    elif cfg.flag("attn_temperature_tuning"):
        q = b.scale_by_position(q, cfg.number("attn_scale"), cfg.size("floor_scale"), first=1)
    in_chunks = rotates and cfg.get("attention_chunk_size") is not None
    if cfg.get("layer_types"):
        in_chunks = cfg.layer_types[layer] == CHUNKED
    window = cfg.size("attention_chunk_size") if in_chunks else None
    h = b.attention(q, k, v, window=window, chunked=in_chunks)
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _rotates(cfg: ModelConfig, layer: int) -> bool:
    """Return False for the layers with a 0 in no_rope_layers, or every no_rope_layer_interval-th."""
    stated = cfg.integers("no_rope_layers")
    if stated and layer >= len(stated):
        raise ConfigError(f"config.json: no_rope_layers has {len(stated)} entries, fewer than layers")
    return bool(stated[layer]) if stated else (layer + 1) % cfg.size("no_rope_layer_interval") != 0


def _is_sparse(cfg: ModelConfig, layer: int) -> bool:
    """Return True for layers with experts: those in moe_layers, or every interleave_moe_layer_step-th."""
    if cfg.get("moe_layers") is not None:
        return layer in cfg.integers("moe_layers")
    return (layer + 1) % cfg.size("interleave_moe_layer_step") == 0


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "router", cfg.num_experts)
    experts = fused_experts(cfg, p / "experts", cfg.intermediate_size, transposed=True)
    routing = Routing(cfg.size("num_experts_per_tok"), affinity="sigmoid", on_inputs=True)
    mixed = b.experts(h, scores, experts, routing=routing, activation=cfg.hidden_act)
    return b.add(gated_mlp(b, cfg, h, p / "shared_expert"), mixed)
