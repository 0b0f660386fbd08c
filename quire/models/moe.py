"""Mixtures of experts: Mixtral (arXiv:2401.04088), OLMoE (2409.02060), gpt-oss (2508.10925)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict

from quire.errors import ConfigError, quoted
from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.layers import GATE_UP_DOWN, embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.tower import place_images
from quire.program import Builder, Names, Rows, Value, WeightSpec
from quire.program.ops.experts import ExpertWeights, Routing

Transposed = bool | Literal["either"]  # as WeightSpec has it


class ExpertOptions(TypedDict):
    """The keywords of Builder.experts that routing() fills in."""

    routing: Routing
    activation: str


def expert_stack(
    cfg: ModelConfig, p: Names, inner: int, names: tuple[str, str, str] = GATE_UP_DOWN
) -> ExpertWeights:
    """Return experts stored as separate matrices, p.0.gate_proj and so on, stacked at load."""

    def stack(part: str, rows: int, width: int) -> WeightSpec:
        count = cfg.num_experts
        sources = tuple(p / f"{expert}.{part}.weight" for expert in range(count))
        return WeightSpec(p / f"{part}.weight", (count, rows, width), sources, quantizable=True)

    gate, up, down = names
    hidden = cfg.hidden_size
    return ExpertWeights(stack(gate, inner, hidden), stack(up, inner, hidden), stack(down, hidden, inner))


def fused_experts(cfg: ModelConfig, p: Names, inner: int, transposed: Transposed = False) -> ExpertWeights:
    """Return experts of which one tensor has gates, then what they multiply: gate_up_proj, down_proj."""
    count, hidden = cfg.num_experts, cfg.hidden_size

    def half(name: str, first: int) -> WeightSpec:
        rows = Rows(2 * inner, ((first, inner),))
        return WeightSpec(p / name, (count, inner, hidden), (p / "gate_up_proj",), transposed, rows, True)

    down = WeightSpec(p / "down", (count, hidden, inner), (p / "down_proj",), transposed, quantizable=True)
    return ExpertWeights(half("gate", 0), half("up", inner), down)


def mixtral(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn")
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        moe = p / "block_sparse_moe"
        scores = b.linear(h, moe / "gate", cfg.num_experts)
        experts = expert_stack(cfg, moe / "experts", cfg.intermediate_size, ("w1", "w3", "w2"))
        mixed = b.experts(
            h,
            scores,
            experts,
            routing=Routing(cfg.size("num_experts_per_tok"), normalized=True),
            activation=cfg.hidden_act,
        )
        x = b.add(x, mixed)
    return head(b, cfg, x, w)


def olmoe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, _olmoe_attention(b, cfg, h, p / "self_attn"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        scores = b.linear(h, p / "mlp.gate", cfg.num_experts)
        experts = expert_stack(cfg, p / "mlp.experts", cfg.intermediate_size)
        x = b.add(x, b.experts(h, scores, experts, **routing(cfg)))
    return head(b, cfg, x, w)


def routing(cfg: ModelConfig) -> ExpertOptions:
    """Return the routing options of OLMoE and Qwen."""
    return {
        "routing": Routing(cfg.size("num_experts_per_tok"), normalized=cfg.flag("norm_topk_prob")),
        "activation": cfg.hidden_act,
    }


def is_sparse(cfg: ModelConfig, layer: int) -> bool:
    """Return True for a layer with experts: each, or every decoder_sparse_step-th, but those listed."""
    if not cfg.get("num_experts") or layer in cfg.integers("mlp_only_layers"):
        return False
    return (layer + 1) % cfg.size("decoder_sparse_step") == 0


def listed_sparse(cfg: ModelConfig, layer: int, otherwise: bool) -> bool:
    """Return True for a layer that mlp_layer_types calls sparse; without this list, `otherwise`."""
    types = cfg.get("mlp_layer_types")
    if types is None:
        return otherwise
    if not isinstance(types, list) or layer >= len(types) or types[layer] not in ("dense", "sparse"):
        problem = f"mlp_layer_types = {quoted(types)} does not say dense or sparse of each layer"
        raise ConfigError(f"config.json: {problem}")
    return bool(types[layer] == "sparse")


def gated_shared_expert(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return the shared expert of Qwen, times a sigmoid of each token."""
    shared = gated_mlp(b, cfg, h, p / "shared_expert", width=cfg.size("shared_expert_intermediate_size"))
    return b.gated_activation(b.linear(h, p / "shared_expert_gate", 1), shared, "sigmoid")


def _olmoe_attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = wide_norm_qkv(b, cfg, h, p, bias)
    q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v), p / "o_proj", cfg.hidden_size, bias=bias)


def wide_norm_qkv(b: Builder, cfg: ModelConfig, h: Value, p: Names, bias: bool) -> tuple[Value, Value, Value]:
    """Return queries and keys normalized over their whole width before they are split into heads (OLMo)."""
    heads, groups, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q = b.rms_norm(b.linear(h, p / "q_proj", heads * dim, bias=bias), p / "q_norm", cfg.norm_eps)
    k = b.rms_norm(b.linear(h, p / "k_proj", groups * dim, bias=bias), p / "k_norm", cfg.norm_eps)
    v = b.linear(h, p / "v_proj", (groups, dim), bias=bias)
    return b.slice(q, 0, (heads, dim)), b.slice(k, 0, (groups, dim)), v


# Default rope parameters of gpt-oss.
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    bias, limit = cfg.flag("attention_bias"), cfg.positive("swiglu_limit")
    unstated = not cfg.get("rope_scaling") and cfg.get("rope_parameters") is None
    rope = cfg.rope(_GPT_OSS_YARN if unstated else None)
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x = place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, rope)
        h = b.attention(q, k, v, window=cfg.window(i), sinks=p / "self_attn.sinks")
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        scores = b.linear(h, p / "mlp.router", cfg.num_experts, bias=True)
        experts = _gpt_oss_experts(cfg, p / "mlp.experts")
        chosen = Routing(cfg.size("num_experts_per_tok"), normalized=True)
        x = b.add(x, b.experts(h, scores, experts, routing=chosen, limit=limit))
    return head(b, cfg, x, w)


def _gpt_oss_experts(cfg: ModelConfig, p: Names) -> ExpertWeights:
    """Return experts stored in one tensor [experts, in, out], with alternating columns of gate and up."""
    count, hidden, inner = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size

    def alternating(first: int) -> Rows | None:
        return None if first < 0 else Rows(2, ((first, 1),))

    def part(name: str, source: str, first: int, rows: int, width: int) -> WeightSpec:
        return WeightSpec(
            p / name, (count, rows, width), (p / source,), True, alternating(first), quantizable=True
        )

    def bias(name: str, source: str, first: int, rows: int) -> WeightSpec:
        return WeightSpec(p / name, (count, rows), (p / source,), rows=alternating(first))

    return ExpertWeights(
        gate=part("gate", "gate_up_proj", 0, inner, hidden),
        up=part("up", "gate_up_proj", 1, inner, hidden),
        down=part("down", "down_proj", -1, hidden, inner),
        gate_bias=bias("gate_bias", "gate_up_proj_bias", 0, inner),
        up_bias=bias("up_bias", "gate_up_proj_bias", 1, inner),
        down_bias=bias("down_bias", "down_proj_bias", -1, hidden),
    )


def biased_routing(cfg: ModelConfig, p: Names) -> Routing:
    """Return the routing of DeepSeek-V3: sigmoids, with a bias that only chooses."""
    name = p / "gate.e_score_correction_bias"
    bias = WeightSpec(name, (cfg.num_experts,), (name,))
    return replace(pair_routing(cfg, p), affinity="sigmoid", bias=bias)


def pair_routing(cfg: ModelConfig, p: Names) -> Routing:
    """Return the routing of Mistral 4: groups rank by two experts."""
    routing = Routing(
        cfg.size("num_experts_per_tok"),
        normalized=cfg.flag("norm_topk_prob"),
        group_rank="top2",
        scaling=cfg.optional_positive("routed_scaling_factor") or 1.0,
        floor=1e-20,
    )
    return grouped(cfg, routing)


def grouped(cfg: ModelConfig, routing: Routing) -> Routing:
    """Return a routing with the groups of config.json."""
    groups, kept = (cfg.optional_size(name) or 1 for name in ("n_group", "topk_group"))
    return replace(routing, groups=groups, kept_groups=kept)
