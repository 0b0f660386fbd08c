"""Hy3 (Tencent, 2026): Qwen3's attention, and experts chosen as in DeepSeek-V3 beside a shared one."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.deepseek import is_sparse
from quire.models.layers import embed_tokens, gated_mlp, head
from quire.models.moe import expert_stack
from quire.models.qwen3 import attention
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing


def hy_v3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope, x = cfg.rope(), embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, attention(b, cfg, i, h, p / "self_attn", rope))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        if is_sparse(cfg, i):
            x = b.add(x, _experts(b, cfg, h, p / "mlp"))
        else:
            x = b.add(x, gated_mlp(b, cfg, h, p / "mlp", bias=cfg.flag("mlp_bias")))
    return head(b, cfg, x, w)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Mix the experts that sigmoids choose, with a bias that only chooses, and add the shared one."""
    inner, name = cfg.size("moe_intermediate_size"), p / "expert_bias"
    routing = Routing(
        cfg.size("num_experts_per_tok"),
        affinity="sigmoid",
        normalized=True,
        bias=WeightSpec(name, (cfg.num_experts,), (name,)),
        scaling=cfg.positive("router_scaling_factor"),
        floor=1e-20,
    )
    scores = b.linear(h, p / "router.gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", inner)
    mixed = b.experts(h, scores, experts, routing=routing, activation=cfg.hidden_act)
    width = inner * cfg.size("num_shared_experts")
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_mlp", bias=cfg.flag("mlp_bias"), width=width))
