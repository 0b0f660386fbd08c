"""Trinity (Arcee, AFMoE): gated attention with norms of each head, and positions in window layers only; norms
before and after each part; experts by sigmoids, with a bias that only chooses, beside shared ones.
"""

from __future__ import annotations

import math

from quire.models.config import SLIDING, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing


def afmoe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    if cfg.flag("mup_enabled"):
        x = b.scale(x, math.sqrt(cfg.hidden_size))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        h = _attention(b, cfg, i, h, p / "self_attn")
        x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
        h = b.rms_norm(x, p / "pre_mlp_layernorm", cfg.norm_eps)
        mlp = _experts if i >= cfg.number("num_dense_layers") else gated_mlp
        h = mlp(b, cfg, h, p / "mlp")
        x = b.add(x, b.rms_norm(h, p / "post_mlp_layernorm", cfg.norm_eps))
    return head(b, cfg, x, w)


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    gate = b.linear(h, p / "gate_proj", cfg.num_attention_heads * cfg.head_dim)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps)
    if cfg.layer_types[layer] == SLIDING:
        q, k = rotate(b, q, k, cfg.rope())
    mixed = b.attention(q, k, v, window=cfg.window(layer))
    gated = b.gated_activation(gate, mixed, "sigmoid")
    return b.linear(gated, p / "o_proj", cfg.hidden_size, bias=bias)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    inner = cfg.size("moe_intermediate_size")
    bias = WeightSpec(p / "expert_bias", (cfg.num_experts,), (p / "expert_bias",))
    scaling, chosen = cfg.positive("route_scale"), cfg.size("num_experts_per_tok")
    routing = Routing(chosen, "sigmoid", normalized=True, bias=bias, scaling=scaling, floor=1e-20)
    scores = b.linear(h, p / "router.gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", inner)
    mixed = b.experts(h, scores, experts, routing=routing, activation=cfg.hidden_act)
    width = inner * cfg.size("num_shared_experts")
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_experts", width=width))
