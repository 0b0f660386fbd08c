"""LFM2 and LFM2-MoE (Liquid AI, arXiv:2511.23404): most layers have a short convolution between two gates,
the others attention with a norm of each query and key head.
"""

from __future__ import annotations

from quire.images.vision import Vision
from quire.models.config import FULL, MAX_KERNEL, Fields, ModelConfig
from quire.models.layers import embed_tokens, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.models.tower import place_images
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing

CONV = "conv"


def lfm2(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    kinds, sparse = _kinds(cfg), "num_experts" in cfg.values
    inner = cfg.intermediate_size if sparse else _intermediate_size(cfg)
    dense = cfg.number("num_dense_layers") if sparse else cfg.num_hidden_layers
    x = embed_tokens(b, cfg, w)
    x = x if vision is None else place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "operator_norm", cfg.norm_eps)
        x = b.add(
            x, gated_convolution(b, cfg, h, p / "conv") if kinds[i] == CONV else _attention(b, cfg, h, p)
        )
        h = b.rms_norm(x, p / "ffn_norm", cfg.norm_eps)
        p = p / "feed_forward"
        x = b.add(x, gated_mlp(b, cfg, h, p, inner) if i < dense else _experts(b, cfg, h, p))
    x = b.rms_norm(b.sampled_rows(x), w / "model.embedding_norm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)


def _kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the type of each layer; older configs list those with attention, by default all."""
    if cfg.get("layer_types") or cfg.get("full_attn_idxs") is None:
        return cfg.layer_types
    attends = cfg.integers("full_attn_idxs")
    return tuple(FULL if i in attends else CONV for i in range(cfg.num_hidden_layers))


def _intermediate_size(cfg: ModelConfig) -> int:
    """Return the width of MLPs: two thirds of that stated, scaled and rounded up, unless it is exact."""
    width = cfg.intermediate_size
    if cfg.flag("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
        if cfg.get("block_ffn_dim_multiplier") is not None:
            multiple = cfg.size("block_multiple_of")
            width = int(cfg.positive("block_ffn_dim_multiplier") * width)
            width = -(-width // multiple) * multiple
    return Fields({"intermediate_size": width}).size("intermediate_size")


def gated_convolution(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return out(C * conv(B * x)), with B, C and x from one projection."""
    hidden, bias = cfg.hidden_size, cfg.flag("conv_bias")
    packed = b.linear(h, p / "in_proj", 3 * hidden, bias=bias)
    before, after, x = (b.slice(packed, part * hidden, hidden) for part in range(3))
    x = b.gated_activation(before, x, "linear")
    x = b.short_convolution(x, p / "conv", cfg.size("conv_L_cache", MAX_KERNEL), bias=bias)
    return b.linear(b.gated_activation(after, x, "linear"), p / "out_proj", hidden, bias=bias)


def _attention(b: Builder, cfg: ModelConfig, h: Value, layer: Names) -> Value:
    p = layer / "self_attn"
    q, k, v = project_qkv(b, cfg, h, p)
    q = b.rms_norm(q, p / "q_layernorm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_layernorm", cfg.norm_eps)
    q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v), p / "out_proj", cfg.hidden_size)


def gated_mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names, inner: int) -> Value:
    gate, up = (b.linear(h, p / name, inner) for name in ("w1", "w3"))
    return b.linear(b.gated_activation(gate, up, "silu"), p / "w2", cfg.hidden_size)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Mix the experts that sigmoids choose, with a bias that only chooses."""
    name = p / "expert_bias"
    routing = Routing(
        cfg.size("num_experts_per_tok"),
        affinity="sigmoid",
        normalized=cfg.flag("norm_topk_prob"),
        bias=WeightSpec(name, (cfg.num_experts,), (name,)) if cfg.flag("use_expert_bias") else None,
        scaling=cfg.positive("routed_scaling_factor"),
        floor=1e-6,
    )
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.size("moe_intermediate_size"), ("w1", "w3", "w2"))
    return b.experts(h, scores, experts, routing=routing, activation="silu")
