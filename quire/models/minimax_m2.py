"""MiniMax-M2: norms over all query and key heads, a part of each head rotated, experts by sigmoids."""

from __future__ import annotations

from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, head, rotate
from quire.models.moe import expert_stack, wide_norm_qkv
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing


def minimax_m2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope(dim=_rotated(cfg))
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = wide_norm_qkv(b, cfg, h, p / "self_attn", bias=False)
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, _experts(b, cfg, h, p / "block_sparse_moe"))
    return head(b, cfg, x, w)


def _rotated(cfg: ModelConfig) -> int:
    """Return how many numbers of a head are rotated: a stated part, rotary_dim, or all."""
    part = cfg.rope_parameters().get("partial_rotary_factor", cfg.get("partial_rotary_factor"))
    if part is None:
        return cfg.optional_size("rotary_dim") or cfg.head_dim
    return int(cfg.head_dim * Fields({"partial_rotary_factor": part}).number("partial_rotary_factor", 0, 1))


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    name = p / "e_score_correction_bias"
    bias = WeightSpec(name, (cfg.num_experts,), (name,))
    chosen = Routing(cfg.size("num_experts_per_tok"), "sigmoid", normalized=True, bias=bias)
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.intermediate_size, ("w1", "w3", "w2"))
    return b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act)
