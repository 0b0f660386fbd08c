"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437), and families with their latent attention or router.

The heads' keys and values are products of one cached latent (quire.program.ops.latent). Experts are chosen
among groups, beside shared ones that every token uses; the first layers are dense. GLM-4.5 to 4.7 and the
text models of GLM-4.5V and 4.6V have the router without the attention (arXiv:2508.06471), MiniCPM3 and
Youtu-LLM the attention without the router.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.layers import (
    GATE_UP_DOWN,
    embed_tokens,
    gated_mlp,
    head,
    project_qkv,
    query_growth,
    rotate,
)
from quire.models.moe import (
    biased_routing,
    expert_stack,
    fused_experts,
    grouped,
    listed_sparse,
    pair_routing,
)
from quire.models.prediction import Has, joined, shared_head
from quire.models.tower import place_images
from quire.models.vision import by_place
from quire.program import Builder, Names, Program, Rows, Value, WeightSpec
from quire.program.ops.experts import Routing
from quire.program.rope import Rope, mscale

Router = Callable[[ModelConfig, Names], Routing]
Choose = Callable[[Value, Value], Value]
_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is
_SECTIONS = (8, 12, 12)  # of GLM-4.5V


def deepseek_v2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope(dim=cfg.size("qk_rope_head_dim"), interleaved=True)
    return _layers(b, cfg, w, rope, _softmax_routing)


def deepseek_v3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope(dim=cfg.size("qk_rope_head_dim"), interleaved=cfg.flag("rope_interleave"))
    return _layers(b, cfg, w, rope, biased_routing)


# Default rope parameters of Mistral 4.
_MISTRAL4_YARN = {
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    """Record DeepSeek-V3's layers with a softmax router, and queries that grow with the position."""
    given = cfg.rope_parameters() or _MISTRAL4_YARN
    interleaved, dim = cfg.flag("rope_interleave"), cfg.size("qk_rope_head_dim")
    rope = cfg.rope(given, dim=dim, interleaved=interleaved)
    return _layers(b, cfg, w, rope, pair_routing, given, query_growth(cfg, given), vision)


def youtu(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope(dim=cfg.size("qk_rope_head_dim"), interleaved=cfg.flag("rope_interleave"))
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, latent_attention(b, cfg, h, p / "self_attn", rope))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def minicpm3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope(dim=cfg.size("qk_rope_head_dim"))
    depth = cfg.optional_positive("scale_depth")
    residual = 1.0 if depth is None else depth / math.sqrt(cfg.num_hidden_layers)
    x = b.scale(embed_tokens(b, cfg, w), cfg.positive("scale_emb"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, b.scale(latent_attention(b, cfg, h, p / "self_attn", rope), residual))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, b.scale(gated_mlp(b, cfg, h, p / "mlp", bias=cfg.flag("mlp_bias")), residual))
    base = cfg.optional_size("dim_model_base") or cfg.hidden_size
    return b.scale(head(b, cfg, x, w), base / cfg.hidden_size)


def glm4_moe(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    x, rope = embed_tokens(b, cfg, w), cfg.rope()
    if vision is not None:
        x, rope = place_images(b, x), by_place(rope, cfg, _SECTIONS, in_chunks=True)
    for i in range(cfg.num_hidden_layers):
        x = dense_attention_layer(b, cfg, i, x, w / f"model.layers.{i}", rope)
    return head(b, cfg, x, w)


def dense_attention_layer(b: Builder, cfg: ModelConfig, layer: int, x: Value, p: Names, rope: Rope) -> Value:
    """Return the output of a layer with keys and values by head."""
    h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
    q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=cfg.flag("attention_bias"))
    if cfg.flag("use_qk_norm"):
        q = b.rms_norm(q, p / "self_attn.q_norm", cfg.norm_eps)
        k = b.rms_norm(k, p / "self_attn.k_norm", cfg.norm_eps)
    q, k = rotate(b, q, k, rope)
    x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size))
    h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
    return b.add(x, experts_or_mlp(b, cfg, layer, h, p / "mlp", biased_routing))


def mtp_v3(b: Builder, cfg: ModelConfig, w: Names, has: Has) -> Program:
    """Record that of DeepSeek-V3 and GLM-4.7-Flash, which hands on its hidden states before the norm."""
    p = later_layer(cfg, w)
    rope = cfg.rope(dim=cfg.size("qk_rope_head_dim"), interleaved=cfg.flag("rope_interleave"))
    x = joined(b, cfg, w, p)
    return shared_head(
        b, cfg, w, p, latent_attention_layer(b, cfg, like_last(cfg), x, p, rope, biased_routing)
    )


def mtp_glm4(b: Builder, cfg: ModelConfig, w: Names, has: Has) -> Program:
    """Record that of GLM-4.5 to 4.7, which does the same."""
    p = later_layer(cfg, w)
    x = joined(b, cfg, w, p)
    return shared_head(b, cfg, w, p, dense_attention_layer(b, cfg, like_last(cfg), x, p, cfg.rope()))


def later_layer(cfg: ModelConfig, w: Names) -> Names:
    """Return the name of the layer that predicts further tokens."""
    return w / f"model.layers.{cfg.num_hidden_layers}"


def like_last(cfg: ModelConfig) -> int:
    """Return the number of the layer that has the same kind of MLP: the last one."""
    return cfg.num_hidden_layers - 1


def _layers(
    b: Builder,
    cfg: ModelConfig,
    w: Names,
    rope: Rope,
    routing: Router,
    given: Mapping[str, Any] | None = None,
    growth: tuple[float, int] | None = None,
    vision: Vision | None = None,
) -> Value:
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x = place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        x = latent_attention_layer(b, cfg, i, x, w / f"model.layers.{i}", rope, routing, given, growth)
    return head(b, cfg, x, w)


def latent_attention_layer(
    b: Builder,
    cfg: ModelConfig,
    layer: int,
    x: Value,
    p: Names,
    rope: Rope,
    routing: Router,
    given: Mapping[str, Any] | None = None,
    growth: tuple[float, int] | None = None,
    choose: Choose | None = None,
) -> Value:
    """Return the output of a layer; for the last three see latent_attention."""
    h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
    x = b.add(x, latent_attention(b, cfg, h, p / "self_attn", rope, given, growth, choose))
    h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
    return b.add(x, experts_or_mlp(b, cfg, layer, h, p / "mlp", routing))


def experts_or_mlp(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names, routing: Router) -> Value:
    """Return the output of the layer's experts, or of its MLP if it is dense."""
    if is_sparse(cfg, layer):
        return mixture(b, cfg, h, p, routing)
    return gated_mlp(b, cfg, h, p, cfg.flag("mlp_bias"))


def mixture(
    b: Builder,
    cfg: ModelConfig,
    h: Value,
    p: Names,
    routing: Router,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Value:
    """Return the mixture of experts, and the shared ones of a family that has them."""
    inner = cfg.size("moe_intermediate_size")
    scores = b.linear(h, p / "gate", cfg.num_experts)
    fused = routing is pair_routing
    own = p / "experts"
    experts = fused_experts(cfg, own, inner) if fused else expert_stack(cfg, own, inner, names)
    mixed = b.experts(h, scores, experts, routing=routing(cfg, p), activation=cfg.hidden_act)
    if "n_shared_experts" not in cfg.values:
        return mixed
    width = inner * cfg.size("n_shared_experts")
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_experts", cfg.flag("mlp_bias"), width))


def is_sparse(cfg: ModelConfig, layer: int) -> bool:
    """Return True for layers with experts."""
    num_dense = cfg.number("first_k_dense_replace") if "first_k_dense_replace" in cfg.values else 1
    return listed_sparse(cfg, layer, otherwise=layer >= num_dense)


def latent_attention(
    b: Builder,
    cfg: ModelConfig,
    h: Value,
    p: Names,
    rope: Rope | None,
    given: Mapping[str, Any] | None = None,
    growth: tuple[float, int] | None = None,
    choose: Choose | None = None,
) -> Value:
    """Return the output of MLA in its absorbed form: queries and mixed latents are multiplied by head.

    `given` are the parameters of the rope (None: nothing is rotated), by default those of config.json;
    `growth` (beta, period) that of queries (ScaleByPosition). `choose` records the positions that tokens
    attend to, of h and the latent of the queries.
    """
    bias, heads, rank = cfg.flag("attention_bias"), cfg.num_attention_heads, cfg.size("kv_lora_rank")
    plain, turned = cfg.size("qk_nope_head_dim"), cfg.size("qk_rope_head_dim")
    values = cfg.optional_size("v_head_dim") or cfg.hidden_size // heads
    source, x = p / "q_proj", h
    if (compressed := cfg.optional_size("q_lora_rank")) is not None:
        x = b.rms_norm(b.linear(h, p / "q_a_proj", compressed, bias=bias), p / "q_a_layernorm", _EPS)
        source = p / "q_b_proj"
    width = plain + turned
    q = b.linear(x, source, (heads, plain), rows=Rows(width, ((0, plain),)), part="plain")
    q_rope = b.linear(x, source, (heads, turned), rows=Rows(width, ((plain, turned),)), part="rotated")
    both = b.linear(h, p / "kv_a_proj_with_mqa", rank + turned, bias=bias)
    c = b.rms_norm(b.slice(both, 0, rank), p / "kv_a_layernorm", _EPS)
    r = b.slice(both, rank, (1, turned))

    kv_b, each = p / "kv_b_proj", plain + values
    of_keys = WeightSpec(
        kv_b / "keys.weight",
        (heads, rank, plain),
        (kv_b / "weight",),
        rows=Rows(each, ((0, plain),)),
        quantizable=True,
        by_head="inputs",
    )
    of_values = WeightSpec(
        kv_b / "values.weight",
        (heads, values, rank),
        (kv_b / "weight",),
        rows=Rows(each, ((plain, values),)),
        quantizable=True,
        by_head="outputs",
    )
    q = b.linear_by_head(q, of_keys)
    if rope is not None:
        q_rope, r = rotate(b, q_rope, r, rope)
    if growth is not None:
        q, q_rope = b.scale_by_position(q, *growth), b.scale_by_position(q_rope, *growth)
    scale = _score_scale(cfg.rope_parameters() if given is None else given, rope, width)
    chosen = None if choose is None else choose(h, x)
    mixed = b.latent_attention(q, q_rope, c, r, scale=scale, chosen=chosen)
    return b.linear(b.linear_by_head(mixed, of_values), p / "o_proj", cfg.hidden_size, bias=bias)


def _score_scale(given: Mapping[str, Any], rope: Rope | None, width: int) -> float:
    """Return the factor of scores; a scaled rope with mscale_all_dim raises it (YaRN in DeepSeek-V2)."""
    of_all = given.get("mscale_all_dim")
    longer = mscale(rope.factor, of_all) if rope and of_all and rope.rope_type != "default" else 1.0
    return width**-0.5 * longer * longer


def _softmax_routing(cfg: ModelConfig, p: Names) -> Routing:
    """Return the routing of V2."""
    routing = Routing(cfg.size("num_experts_per_tok"), scaling=cfg.positive("routed_scaling_factor"))
    return grouped(cfg, routing) if cfg.get("topk_method") == "group_limited_greedy" else routing
