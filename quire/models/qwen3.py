"""Qwen3, Qwen3-MoE (arXiv:2505.09388) and the text model of Qwen3-VL (2511.21631): Llama's block with a norm
of each query and key head.

Qwen3-VL rotates tokens of images by three positions, and adds features of its tower's layers behind its own.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack, fused_experts, is_sparse, routing
from quire.models.tower import add_images, place_images
from quire.models.vision import by_place
from quire.program import Builder, Names, Value
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

_SECTIONS = (24, 20, 20)  # of Qwen3-VL
Mlp = Callable[[Builder, ModelConfig, Value, Names], Value]


def qwen3(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, _experts, cfg.rope(), vision)


def qwen3_vl(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    rope = cfg.rope() if vision is None else by_place(cfg.rope(), cfg, _SECTIONS)
    return _decoder(b, cfg, w, _fused_experts, rope, vision)


def _decoder(
    b: Builder, cfg: ModelConfig, w: Names, experts: Mlp, rope: Rope, vision: Vision | None
) -> Value:
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x = place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, attention(b, cfg, i, h, p / "self_attn", rope))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = experts if is_sparse(cfg, i) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
        if vision is not None and i < vision.num_added:
            x = add_images(b, x, 1 + i)
    return head(b, cfg, x, w)


def attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names, rope: Rope) -> Value:
    """Attend, with a norm of each query and key head."""
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps)
    q, k = rotate(b, q, k, rope)
    h = b.attention(q, k, v, window=cfg.window(layer))
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.size("moe_intermediate_size"))
    return b.experts(h, scores, experts, **routing(cfg))


def _fused_experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = fused_experts(cfg, p / "experts", cfg.size("moe_intermediate_size"), transposed="either")
    chosen = Routing(cfg.size("num_experts_per_tok"), normalized=True)
    return b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act)
