"""Ernie 4.5 (Baidu, 2025), text: Llama's block with neighbours rotated in pairs; some have experts."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing

_FLOOR = 1e-12  # of the sum of shares, where theirs is the least value of it


def ernie4_5(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn")
        q, k = rotate(b, q, k, cfg.rope(interleaved=True))
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = _experts if _is_sparse(cfg, i) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _is_sparse(cfg: ModelConfig, layer: int) -> bool:
    """Return True for every moe_layer_interval-th layer, from the first to the last that are stated."""
    if "num_experts" not in cfg.values:
        return False
    first, last = cfg.number("moe_layer_start_index"), cfg.number("moe_layer_end_index")
    within = first <= layer and (last == -1 or layer <= last)
    return within and (layer + 1) % cfg.size("moe_layer_interval") == 0


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    inner, name = cfg.size("moe_intermediate_size"), p / "moe_statics.e_score_correction_bias"
    bias = WeightSpec(name, (1, cfg.num_experts), (name,))
    chosen = Routing(cfg.size("num_experts_per_tok"), normalized=True, bias=bias, floor=_FLOOR)
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", inner)
    mixed = b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act)
    if not cfg.get("moe_num_shared_experts"):
        return mixed
    width = inner * cfg.size("moe_num_shared_experts")
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_experts", width=width))
