"""Hunyuan (Tencent, 2025), dense and with experts (arXiv:2411.02265): queries and keys normalized after their
rotation, whose base may be stretched once for all lengths.
"""

from __future__ import annotations

from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.program import Builder, Names, Value
from quire.program.ops.experts import Routing
from quire.program.rope import THETA, Rope


def hunyuan(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias, rope = cfg.flag("attention_bias"), _rope(cfg)
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, rope)
        q = b.rms_norm(q, p / "self_attn.query_layernorm", cfg.norm_eps)
        k = b.rms_norm(k, p / "self_attn.key_layernorm", cfg.norm_eps)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        sparse = "num_experts" in cfg.values
        x = b.add(x, _experts(b, cfg, i, h, p / "mlp") if sparse else gated_mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _rope(cfg: ModelConfig) -> Rope:
    """Return the rope; one called dynamic with an `alpha` has its base stretched, whatever the length."""
    given = cfg.rope_parameters()
    if "dynamic" not in (given.get("rope_type"), given.get("type")) or not given.get("alpha"):
        return cfg.rope(given)
    fields = Fields({"rope_theta": cfg.get("rope_theta"), **given})
    dim = max(cfg.head_dim, 4)
    stretch = fields.number("alpha", 1e-3, 1e6) ** (dim / (dim - 2))
    return cfg.rope({"rope_theta": fields.number("rope_theta", *THETA) * stretch})


def _experts(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    """Return the mixture of experts, and the shared one beside it."""
    scores = b.linear(h, p / "gate.wg", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.intermediate_size)
    chosen = Routing(_chosen(cfg, layer), normalized=True)
    mixed = b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act)
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_mlp"))


def _chosen(cfg: ModelConfig, layer: int) -> int:
    """Return the number of experts of a token, stated once or by layer."""
    stated = cfg.get("num_experts_per_tok")
    if isinstance(stated, list) and layer < len(stated):
        stated = stated[layer]
    return Fields({"moe_topk": stated}).size("moe_topk")
