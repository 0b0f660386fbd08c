"""Mellum 2 (JetBrains): Qwen3's attention with a window and a rope by the type of the layer, experts."""

from __future__ import annotations

from quire.models.config import FULL, SLIDING, ModelConfig, rope_of_type
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack, listed_sparse, routing
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

# Default rope parameters.
_ROPES = {FULL: {"rope_theta": 500_000.0}, SLIDING: {"rope_theta": 10_000.0}}


def mellum(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q = b.rms_norm(q, p / "self_attn.q_norm", cfg.norm_eps)
        k = b.rms_norm(k, p / "self_attn.k_norm", cfg.norm_eps)
        q, k = rotate(b, q, k, _rope(cfg, cfg.layer_types[i]))
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = _experts if listed_sparse(cfg, i, otherwise=True) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _rope(cfg: ModelConfig, kind: str) -> Rope:
    return cfg.rope(rope_of_type(cfg.rope_parameters() or _ROPES, kind))


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.size("moe_intermediate_size"))
    return b.experts(h, scores, experts, **routing(cfg))
