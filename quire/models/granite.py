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


def granite(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda b, cfg, h, p: gated_mlp(b, cfg, h, p / "mlp", cfg.flag("mlp_bias")))


def granite_moe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, experts_and_shared)


def _decoder(b: Builder, cfg: ModelConfig, w: Names, mlp: Mlp) -> Value:
    bias = cfg.flag("attention_bias")
    residual = cfg.number("residual_multiplier")
    x = b.scale(embed_tokens(b, cfg, w), cfg.number("embedding_multiplier"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v, scale=cfg.number("attention_multiplier"))
        h = b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        x = b.add(x, b.scale(h, residual))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, b.scale(mlp(b, cfg, h, p), residual))
    return b.scale(head(b, cfg, x, w), 1.0 / cfg.positive("logits_scaling"))


def experts_and_shared(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return what a layer has in place of an MLP: experts, an MLP of every token, or their sum."""
    shared = _shared_mlp(b, cfg, h, p / "shared_mlp") if cfg.get("shared_intermediate_size") else None
    if cfg.get("num_experts") == 0 and shared is not None:
        return shared
    mixed = _experts(b, cfg, h, p / "block_sparse_moe")
    return mixed if shared is None else b.add(mixed, shared)


def _shared_mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
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
    routing = Routing(cfg.size("num_experts_per_tok"), normalized=True)
    scores = b.linear(h, p / "router.layer", count)
    return b.experts(h, scores, experts, routing=routing, activation=cfg.hidden_act)
