"""Command A+ (Cohere, 2026): Cohere 2's parallel blocks with experts; the first may be dense, and then have
positions without a window.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError, quoted
from quire.models.config import SLIDING, Fields, ModelConfig
from quire.models.deepseek import is_sparse
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.program import Builder, Names, Value
from quire.program.ops.experts import Routing

DENSE = "first_k_dense_replace"


def slides(fields: Fields, layer: int) -> bool:
    """Return True for window layers: all but every so many of the dense layers, and of those after them."""
    dense = int(fields.number(DENSE, 0))
    if layer < dense:
        return (layer + 1) % fields.size("prefix_dense_sliding_window_pattern") != 0
    return (layer - dense + 1) % fields.size("sliding_window_pattern") != 0


def cohere2_moe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias, stated = (
        cfg.flag("attention_bias"),
        cfg.get("rope_parameters"),
    )  # counts more than rope_scaling here
    rope = cfg.rope(stated if isinstance(stated, Mapping) and stated else None, interleaved=True)
    everywhere = cfg.size("prefix_dense_sliding_window_pattern") == 1
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p, sparse = w / f"model.layers.{i}", is_sparse(cfg, i)
        h = _norm(b, cfg, x, p / "input_layernorm")
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        if cfg.layer_types[i] == SLIDING or (everywhere and not sparse):
            q, k = rotate(b, q, k, rope)
        a = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(a, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        if sparse:
            x = b.add(x, _experts(b, cfg, h, p / "mlp"))
        else:
            width = cfg.optional_size("prefix_dense_intermediate_size")
            x = b.add(x, gated_mlp(b, cfg, h, p / "mlp", width=width))
    x = _norm(b, cfg, b.sampled_rows(x), w / "model.norm")
    return b.scale(b.linear(x, w / cfg.lm_head, cfg.vocab_size), cfg.number("logit_scale"))


def _norm(b: Builder, cfg: ModelConfig, x: Value, p: Names) -> Value:
    """Return the LayerNorm without bias, or the RMSNorm if its epsilon is stated."""
    if cfg.get("root_mean_square_eps") is None:
        return b.layer_norm(x, p, cfg.norm_eps, bias=False)
    return b.rms_norm(x, p, cfg.number("root_mean_square_eps", 1e-20, 1))


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Mix experts by the softmax of the scores of those chosen or the sigmoid of each, beside shared ones."""
    affinity, shared = cfg.get("expert_selection_fn"), cfg.number("num_shared_experts", 0)
    if affinity not in ("softmax", "sigmoid"):
        raise ConfigError(f"config.json: expert_selection_fn = {quoted(affinity)} is not supported")
    normalized = affinity == "softmax" or cfg.flag("norm_topk_prob")
    routing = Routing(cfg.size("num_experts_per_tok"), affinity, normalized)
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.intermediate_size)
    mixed = b.experts(h, scores, experts, routing=routing, activation=cfg.hidden_act)
    if not shared:
        return mixed
    how = cfg.get("shared_expert_combination_strategy")
    if how not in ("average", "sum"):
        problem = f"shared_expert_combination_strategy = {quoted(how)} is not supported"
        raise ConfigError(f"config.json: {problem}")
    width = cfg.intermediate_size * cfg.size("num_shared_experts")
    both = b.add(mixed, gated_mlp(b, cfg, h, p / "shared_experts", width=width))
    return b.scale(both, 0.5 if how == "average" else 1.0)
