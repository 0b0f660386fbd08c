"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): Qwen2's attention, experts beside a gated shared one."""

from __future__ import annotations

from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack, gated_shared_expert, is_sparse, routing
from quire.program import Builder, Names, Value


def qwen2_moe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=cfg.flag("qkv_bias"))
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = _experts if is_sparse(cfg, i) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.size("moe_intermediate_size"))
    mixed = b.experts(h, scores, experts, **routing(cfg))
    return b.add(mixed, gated_shared_expert(b, cfg, h, p))


def slides(fields: Fields, layer: int) -> bool:
    """Return True for window layers: every other one below max_window_layers."""
    return layer % 2 == 0 and layer < fields.size("max_window_layers")
