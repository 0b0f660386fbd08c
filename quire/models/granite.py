"""Granite 3 (IBM): Llama's block with four constant multipliers; some have experts in place of the MLP, and
an MLP that every token uses beside them or not.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.program import Builder, Names, Rows, Value, WeightSpec
from quire.program.ops.experts import ExpertWeights, Routing

Mlp = Callable[[Builder, ModelConfig, Value, Names], Value]  # from the names of a layer
Attention = Callable[[Builder, ModelConfig, int, tuple[Value, Value, Value], Names], Value]


def granite(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return b.scale(decoder(b, cfg, w, dense_mlp), 1.0 / cfg.positive("logits_scaling"))


def granite_moe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return b.scale(decoder(b, cfg, w, experts_and_shared), 1.0 / cfg.positive("logits_scaling"))


def decoder(b: Builder, cfg: ModelConfig, w: Names, mlp: Mlp, attention: Attention | None = None) -> Value:
    """Record the layers and the head, with logits before they are scaled."""
    attention = attention or _attention
    bias, norms_after = cfg.flag("attention_bias"), cfg.flag("use_post_norm")

    def add(x: Value, h: Value, name: Names) -> Value:
        h = b.rms_norm(h, name, cfg.norm_eps) if norms_after else h
        return b.add(x, b.scale(h, cfg.number("residual_multiplier")))

    x = b.scale(embed_tokens(b, cfg, w), cfg.number("embedding_multiplier"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        h = attention(b, cfg, i, project_qkv(b, cfg, h, p / "self_attn", bias=bias), p / "self_attn")
        x = add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias), p / "post_norm1")
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = add(x, mlp(b, cfg, h, p), p / "post_norm2")
    return head(b, cfg, x, w)


def _attention(b: Builder, cfg: ModelConfig, layer: int, qkv: tuple[Value, Value, Value], p: Names) -> Value:
    q, k = rotate(b, *qkv[:2], cfg.rope())
    return b.attention(q, k, qkv[2], scale=score_scale(cfg))


def score_scale(cfg: ModelConfig) -> float:
    """Return the factor of scores: that of config.json, or 1 / sqrt(head_dim)."""
    stated = cfg.get("attention_multiplier")
    return cfg.head_dim**-0.5 if stated is None else cfg.number("attention_multiplier")


def dense_mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    return gated_mlp(b, cfg, h, p / "mlp", cfg.flag("mlp_bias"))


def experts_and_shared(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return what a layer has in place of an MLP: experts, an MLP of every token, or their sum."""
    shared = shared_mlp(b, cfg, h, p / "shared_mlp") if cfg.get("shared_intermediate_size") else None
    if cfg.get("num_experts") == 0 and shared is not None:
        return shared
    mixed = _experts(b, cfg, h, p / "block_sparse_moe")
    return mixed if shared is None else b.add(mixed, shared)


def shared_mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    inner = cfg.size("shared_intermediate_size")
    packed = b.linear(h, p / "input_linear", 2 * inner)
    gate, up = b.slice(packed, 0, inner), b.slice(packed, inner, inner)
    return b.linear(b.gated_activation(gate, up, cfg.hidden_act), p / "output_linear", cfg.hidden_size)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Mix experts stored in one tensor each for all gates and ups, and for all downs."""
    count, hidden, inner = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size
    stored = (p / "input_linear.weight",)

    def half(name: str, first: int) -> WeightSpec:
        rows = Rows(2 * inner, ((first, inner),))
        return WeightSpec(p / name, (count, inner, hidden), stored, rows=rows, quantizable=True)

    name = p / "output_linear.weight"
    down = WeightSpec(name, (count, hidden, inner), (name,), quantizable=True)
    experts = ExpertWeights(half("gate", 0), half("up", inner), down)
    scores = b.linear(h, p / "router.layer", count)
    return b.experts(h, scores, experts, routing=routing_of(cfg), activation=cfg.hidden_act)


def routing_of(cfg: ModelConfig) -> Routing:
    return Routing(cfg.size("num_experts_per_tok"), normalized=True)
