"""Gemma 4, text: layers with a window between layers with wider heads; in small models an embedding for
every layer, and last layers that read the keys and values of earlier ones; in the largest, experts beside
the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.vision import Vision
from quire.models.config import FULL, MAX_HEAD_DIM, SLIDING, Fields, ModelConfig
from quire.models.defaults_gemma4 import HEADS_BY_TYPE
from quire.models.layers import embed_tokens, gated_mlp, head
from quire.models.tower import place_images
from quire.program import Builder, Names, Rows, Value, WeightSpec
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.rope import Rope

_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def gemma4(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    x = b.scale(embed_tokens(b, cfg, w), math.sqrt(cfg.hidden_size))
    inputs, x = None, place_images(b, x) if vision else x
    if cfg.get("hidden_size_per_layer_input"):
        replaced = (vision.token, _padding(cfg)) if vision else None
        inputs = LayerInputs.record(b, cfg, w, x, replaced)
    types, first_shared = _layer_types(cfg), cfg.num_hidden_layers - num_shared(cfg)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        source = last_of_type(types[:first_shared], types[i]) if i >= first_shared else None
        if i == first_shared and not cfg.flag("enable_moe_block"):  # nothing more is cached
            x, inputs = b.sampled_rows(x), inputs and inputs.sampled(b)
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        h = _attention(b, cfg, i, types[i], h, p / "self_attn", source)
        x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
        double = cfg.flag("use_double_wide_mlp") and source is not None
        h = _feedforward(b, cfg, x, p, cfg.intermediate_size * (2 if double else 1))
        x = b.add(x, b.rms_norm(h, p / "post_feedforward_layernorm", cfg.norm_eps))
        if inputs is not None:
            x = b.add(x, inputs.of_layer(b, cfg, i, x, p))
        x = b.scale_by_weight(x, p / "layer_scalar", 1)
    logits = head(b, cfg, x, w)
    cap = cfg.optional_positive("final_logit_softcapping")
    return b.soft_cap(logits, cap) if cap else logits


def of_shared_layers(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the keys and values of layers that read those of others, which checkpoints may have."""
    shared = range(cfg.num_hidden_layers - num_shared(cfg), cfg.num_hidden_layers)
    return tuple(
        f"model.layers.{i}.self_attn.{part}" for i in shared for part in ("[kv]_proj.*", "[kv]_norm.*")
    )


def num_shared(cfg: ModelConfig) -> int:
    shared = cfg.number("num_kv_shared_layers", 0, cfg.num_hidden_layers - 1)
    if shared % 1:
        raise ConfigError(f"config.json: num_kv_shared_layers = {shared} is not a whole number")
    return int(shared)


def _padding(cfg: ModelConfig) -> int:
    """Return the token whose inputs of layers those of images have."""
    return int(cfg.number("pad_token_id", 0, cfg.vocab_size - 1))


def _layer_types(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the type of each layer; the last is always of full attention."""
    cfg.size("sliding_window")
    return (*cfg.layer_types[:-1], FULL)


def last_of_type(types: tuple[str, ...], kind: str) -> int:
    """Return the last layer of a kind."""
    if kind not in types:
        raise ConfigError(f"config.json: num_kv_shared_layers leaves no layer of {kind} with keys and values")
    return len(types) - 1 - types[::-1].index(kind)


def _heads(cfg: ModelConfig, layer: int, kind: str) -> tuple[int, int]:
    """Return the size of a layer's heads and the number of its heads of keys."""
    own = {"head_dim": cfg.head_dim, "num_key_value_heads": cfg.num_key_value_heads}
    stated = cfg.get("per_layer_config")
    if stated == HEADS_BY_TYPE:
        if kind == FULL:
            own["head_dim"] = cfg.get("global_head_dim")
            if cfg.flag("attention_k_eq_v") and cfg.get("num_global_key_value_heads") is not None:
                own["num_key_value_heads"] = cfg.get("num_global_key_value_heads")
    elif stated is not None:
        own |= _stated_of_layer(stated, layer, own.keys())
    return Fields(own).size("head_dim", MAX_HEAD_DIM), Fields(own).size("num_key_value_heads")


def _stated_of_layer(stated: Any, layer: int, known: Collection[str]) -> Mapping[str, Any]:
    """Return what per_layer_config says of a layer, by whose number its fields are listed."""
    try:
        fields = {int(number): own for number, own in stated.items()}.get(layer, {})
        others = fields.keys() - known
    except (AttributeError, TypeError, ValueError):
        problem = f"config.json: per_layer_config = {quoted(stated)} is not an object of layers"
        raise ConfigError(problem) from None
    if others:
        problem = f"config.json: {quoted(min(others))} of per_layer_config is not supported"
        raise ConfigError(problem, f"known are {', '.join(known)}")
    return fields


def _attention(
    b: Builder, cfg: ModelConfig, layer: int, kind: str, h: Value, p: Names, source: int | None
) -> Value:
    """Attention of one layer, over its own keys and values, or over those of the layer `source`."""
    bias, eps, (dim, groups) = cfg.flag("attention_bias"), cfg.norm_eps, _heads(cfg, layer, kind)
    rope = _rope(cfg, kind, dim)
    q = b.linear(h, p / "q_proj", (cfg.num_attention_heads, dim), bias=bias)
    q = b.rotary(b.rms_norm(q, p / "q_norm", eps), rope)
    if source is not None:
        return _out(b, cfg, b.shared_attention(q, source, scale=1.0, causal=kind == FULL), p)
    k = b.linear(h, p / "k_proj", (groups, dim), bias=bias)
    same = cfg.flag("attention_k_eq_v") and kind == FULL
    v = k if same else b.linear(h, p / "v_proj", (groups, dim), bias=bias)
    k = b.rotary(b.rms_norm(k, p / "k_norm", eps), rope)
    v = b.rms_norm(v, None, eps)
    window = None if kind == FULL else cfg.size("sliding_window")
    # In full layers tokens of an image do not see each other either
    return _out(b, cfg, b.attention(q, k, v, scale=1.0, window=window, causal=kind == FULL), p)


def _out(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=cfg.flag("attention_bias"))


def _rope(cfg: ModelConfig, kind: str, dim: int) -> Rope:
    """Read rope_parameters by layer type."""
    stated = cfg.get("rope_parameters")
    stated = _ROPES if stated is None else stated
    own = stated.get(kind, _ROPES[kind]) if isinstance(stated, Mapping) else None
    if not isinstance(own, Mapping) or not stated.keys() & {FULL, SLIDING}:
        raise ConfigError("config.json: rope_parameters is not an object of layer types")
    return cfg.rope({"rope_theta": _ROPES[kind]["rope_theta"], **own}, dim=dim)


def _feedforward(b: Builder, cfg: ModelConfig, x: Value, p: Names, width: int) -> Value:
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, p / name, cfg.norm_eps)

    h = gated_mlp(b, cfg, norm(x, "pre_feedforward_layernorm"), p / "mlp", width=width)
    if not cfg.flag("enable_moe_block"):
        return h
    router, size = p / "router", cfg.hidden_size
    scored = b.scale_by_weight(b.rms_norm(x, None, cfg.norm_eps), router / "scale", size)
    scores = b.linear(b.scale(scored, size**-0.5), router / "proj", cfg.num_experts)
    factors = WeightSpec(router / "per_expert_scale", (cfg.num_experts,), (router / "per_expert_scale",))
    mixed = b.experts(
        norm(x, "pre_feedforward_layernorm_2"),
        scores,
        _experts(cfg, p / "experts"),
        routing=Routing(cfg.size("top_k_experts"), normalized=True, factors=factors),
        activation=cfg.hidden_act,
    )
    return b.add(norm(h, "post_feedforward_layernorm_1"), norm(mixed, "post_feedforward_layernorm_2"))


def _experts(cfg: ModelConfig, p: Names) -> ExpertWeights:
    """Return experts stored in one tensor each of gate and up, [experts, 2 inner, hidden], and of down."""
    count, hidden, inner = cfg.num_experts, cfg.hidden_size, cfg.size("moe_intermediate_size")

    def half(name: str, first: int) -> WeightSpec:
        rows = Rows(2 * inner, ((first, inner),))
        return WeightSpec(
            p / name, (count, inner, hidden), (p / "gate_up_proj",), rows=rows, quantizable=True
        )

    down = WeightSpec(p / "down_proj", (count, hidden, inner), (p / "down_proj",), quantizable=True)
    return ExpertWeights(half("gate", 0), half("up", inner), down)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of all layers beside the hidden state: [T, layers, size], from a token and its embedding."""

    inputs: Value
    size: int

    @classmethod
    def record(
        cls, b: Builder, cfg: ModelConfig, w: Names, x: Value, replaced: tuple[int, int] | None = None
    ) -> LayerInputs:
        """Record those of embeddings x; of tokens by their ids, but `replaced` ones as in Embed."""
        size = cfg.size("hidden_size_per_layer_input")
        shape = (cfg.num_hidden_layers, size)
        table, rows = w / "model.embed_tokens_per_layer", cfg.size("vocab_size_per_layer_input")
        own = b.scale(b.embed(table, rows, shape, in_place=True, replaced=replaced), math.sqrt(size))
        of_x = b.linear(x, w / "model.per_layer_model_projection", shape)
        of_x = b.scale(of_x, cfg.hidden_size**-0.5)
        of_x = b.rms_norm(of_x, w / "model.per_layer_projection_norm", cfg.norm_eps)
        return cls(b.scale(b.add(of_x, own), 2**-0.5), size)

    def sampled(self, b: Builder) -> LayerInputs:
        """Return the inputs of the rows that need logits."""
        return LayerInputs(b.sampled_rows(self.inputs), self.size)

    def of_layer(self, b: Builder, cfg: ModelConfig, layer: int, x: Value, p: Names) -> Value:
        """Return what the input of a layer adds to its result x."""
        own = b.slice(self.inputs, layer * self.size, self.size)
        gate = b.linear(x, p / "per_layer_input_gate", self.size)
        h = b.gated_activation(gate, own, cfg.hidden_act)
        h = b.linear(h, p / "per_layer_projection", cfg.hidden_size)
        return b.rms_norm(h, p / "post_per_layer_input_norm", cfg.norm_eps)
