"""Families that vary Granite's: with windows, sinks and a rope for each layer (IBM), and HyperCLOVA X
(arXiv:2506.22403), with norms after each part.
"""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.config import Fields, ModelConfig
from quire.models.granite import decoder, dense_mlp, routing_of, score_scale, shared_mlp
from quire.models.layers import rotate
from quire.models.moe import fused_experts
from quire.program import Builder, Names, Value


def granite_swa(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return b.scale(decoder(b, cfg, w, dense_mlp, _window_attention), 1.0 / cfg.positive("logits_scaling"))


def granite_moe_swa(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    logits = decoder(b, cfg, w, _fused_and_shared, _window_attention)
    return b.scale(logits, 1.0 / cfg.positive("logits_scaling"))


def hyperclovax(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return b.scale(decoder(b, cfg, w, dense_mlp), cfg.positive("logits_scaling"))


def _window_attention(
    b: Builder, cfg: ModelConfig, layer: int, qkv: tuple[Value, Value, Value], p: Names
) -> Value:
    """Attend with sinks, the window of the layer, and its base of the rope; 0 rotates nothing."""
    q, k, v = qkv
    if base := _bases(cfg)[layer]:
        q, k = rotate(b, q, k, cfg.rope({**cfg.rope_parameters(), "rope_theta": base}))
    return b.attention(q, k, v, scale=score_scale(cfg), window=cfg.window(layer), sinks=p / "sinks")


def _bases(cfg: ModelConfig) -> list[float]:
    """Return the base of the rope of each layer."""
    stated = cfg.get("layer_rope_theta")
    if stated is None:
        return [cfg.rope().theta] * cfg.num_hidden_layers
    if not isinstance(stated, list) or len(stated) != cfg.num_hidden_layers:
        raise ConfigError("config.json: layer_rope_theta is not a list with a number for each layer")
    return [Fields({"layer_rope_theta": base}).number("layer_rope_theta", 0) for base in stated]


def _fused_and_shared(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return experts under the names that gpt-oss has, and an MLP of every token if there is one."""
    e = p / "block_sparse_moe"
    scores = b.linear(h, e / "router", cfg.num_experts)
    experts = fused_experts(cfg, e / "experts", cfg.intermediate_size)
    mixed = b.experts(h, scores, experts, routing=routing_of(cfg), activation=cfg.hidden_act)
    if not cfg.get("shared_intermediate_size"):
        return mixed
    return b.add(mixed, shared_mlp(b, cfg, h, p / "shared_mlp"))
