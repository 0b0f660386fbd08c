"""Qwen3 and Qwen3-MoE (arXiv:2505.09388): Llama's block with a norm of each query and key head."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack, routing
from quire.program import Builder, Names, Value


def qwen3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, _attention(b, cfg, i, h, p / "self_attn"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = _experts if _is_sparse(cfg, i) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps)
    q, k = rotate(b, q, k, cfg.rope())
    h = b.attention(q, k, v, window=cfg.window(layer))
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _is_sparse(cfg: ModelConfig, layer: int) -> bool:
    if not cfg.get("num_experts") or layer in cfg.integers("mlp_only_layers"):
        return False
    return (layer + 1) % cfg.size("decoder_sparse_step") == 0


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.size("moe_intermediate_size"))
    return b.experts(h, scores, experts, **routing(cfg))
