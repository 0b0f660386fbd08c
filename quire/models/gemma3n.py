"""Gemma 3n, text: several streams of which a layer computes one and corrects all (AltUp, arXiv:2301.13310),
a product of low rank beside attention (LAuReL, arXiv:2411.07501), sparse activations in the first layers; and
as in Gemma 4 inputs for each layer, and last layers that read the keys and values of earlier ones.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from quire.errors import ConfigError, quoted
from quire.models.config import Fields, ModelConfig
from quire.models.gemma import rope_of_type
from quire.models.gemma4 import LayerInputs, last_of_type, num_shared, of_shared_layers
from quire.models.layers import embed_tokens, project_qkv
from quire.program import Builder, Names, Value

MAX_STREAMS = 16
_LEAST_SQUARE = 1e-5  # of the numbers of a stream, on average
_SPARSE_LAYERS, _SPARSE_SHARE = 10, 0.95  # where config.json does not say


def gemma3n(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = b.scale(embed_tokens(b, cfg, w), math.sqrt(cfg.hidden_size))
    inputs = LayerInputs.record(b, cfg, w, x)
    count = cfg.size("altup_num_inputs", MAX_STREAMS)
    active = int(cfg.number("altup_active_idx", 0, count - 1))
    first_shared = cfg.num_hidden_layers - num_shared(cfg)
    cfg.size("sliding_window")
    streams = [x]
    for i in range(count - 1):
        y = b.linear(x, w / f"model.altup_projections.{i}", cfg.hidden_size)
        streams.append(b.match_magnitude(y, x, _LEAST_SQUARE))
    for i in range(cfg.num_hidden_layers):
        p, kind = w / f"model.layers.{i}", cfg.layer_types[i]
        source = last_of_type(cfg.layer_types[:first_shared], kind) if i >= first_shared else None
        if i == first_shared:  # nothing more is cached
            streams, inputs = [b.sampled_rows(stream) for stream in streams], inputs.sampled(b)
        streams = _predict(b, cfg, streams, active, p / "altup")
        result = _layer(b, cfg, i, streams[active], p, source)
        streams = _correct(b, cfg, streams, active, result, p / "altup")
        corrected = streams[active]
        if cfg.flag("altup_correct_scale"):
            corrected = b.scale_by_weight(corrected, p / "altup.correct_output_scale", cfg.hidden_size)
        more = inputs.of_layer(b, cfg, i, corrected, p)
        streams = [streams[0], *(b.add(stream, more) for stream in streams[1:])]
    return _logits(b, cfg, [b.sampled_rows(stream) for stream in streams], w)


def unused(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the tensors of a checkpoint that no layer reads."""
    scales = () if cfg.flag("altup_correct_scale") else ("model.layers.*.altup.correct_output_scale",)
    return (*of_shared_layers(cfg), *scales)


def _route(b: Builder, cfg: ModelConfig, x: Value, p: Names, part: str, width: int) -> Value:
    """Return the coefficients of a token [T, width], from how its streams relate."""
    count = cfg.size("altup_num_inputs", MAX_STREAMS)
    h = b.scale(b.rms_norm(x, p / "router_norm", cfg.norm_eps), 1 / cfg.hidden_size)
    modes = b.soft_cap(b.linear(h, p / "modality_router", count), 1.0)  # tanh
    return b.linear(modes, p / part, width)


def _predict(b: Builder, cfg: ModelConfig, streams: list[Value], active: int, p: Names) -> list[Value]:
    """Return each stream plus its mixture of all."""
    count = len(streams)
    mixtures = _route(b, cfg, streams[active], p, "prediction_coefs", count * count)
    predicted = []
    for i, total in enumerate(streams):
        for j, stream in enumerate(streams):
            share = b.slice(mixtures, i * count + j, 1)
            total = b.add(total, b.gated_activation(share, stream, "linear"))
        predicted.append(total)
    return predicted


def _correct(
    b: Builder, cfg: ModelConfig, streams: list[Value], active: int, result: Value, p: Names
) -> list[Value]:
    """Return each predicted stream plus its share of how the active one was wrong."""
    shares = _route(b, cfg, result, p, "correction_coefs", len(streams))
    error = b.add(result, b.scale(streams[active], -1.0))
    corrected = []
    for i, stream in enumerate(streams):
        share = b.gated_activation(b.slice(shares, i, 1), error, "linear")
        corrected.append(b.add(stream, b.add(share, error)))
    return corrected


def _layer(b: Builder, cfg: ModelConfig, layer: int, x: Value, p: Names, source: int | None) -> Value:
    """Compute attention and MLP of one stream."""

    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, p / name, cfg.norm_eps)

    h = norm(x, "input_layernorm")
    low = b.linear(h, p / "laurel.linear_left", cfg.size("laurel_rank"))
    low = norm(b.linear(low, p / "laurel.linear_right", cfg.hidden_size), "laurel.post_laurel_norm")
    attended = norm(_attention(b, cfg, layer, h, p / "self_attn", source), "post_attention_layernorm")
    x = b.scale(b.add(b.add(x, attended), b.add(h, low)), math.sqrt(0.5))
    h = _mlp(b, cfg, layer, norm(x, "pre_feedforward_layernorm"), p / "mlp")
    return b.add(x, norm(h, "post_feedforward_layernorm"))


def _attention(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names, source: int | None) -> Value:
    bias, eps = cfg.flag("attention_bias"), cfg.norm_eps
    rope = rope_of_type(cfg, cfg.layer_types[layer])
    if source is None:
        q, k, v = project_qkv(b, cfg, h, p, bias=bias)
        q = b.rotary(b.rms_norm(q, p / "q_norm", eps), rope)
        k = b.rotary(b.rms_norm(k, p / "k_norm", eps), rope)
        h = b.attention(q, k, b.rms_norm(v, None, eps), scale=1.0, window=cfg.window(layer))
    else:
        q = b.linear(h, p / "q_proj", (cfg.num_attention_heads, cfg.head_dim), bias=bias)
        h = b.shared_attention(b.rotary(b.rms_norm(q, p / "q_norm", eps), rope), source, scale=1.0)
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)


def _mlp(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names) -> Value:
    width, sparsity = _width(cfg, layer), _sparsity(cfg, layer)
    gate, up = b.linear(h, p / "gate_proj", width), b.linear(h, p / "up_proj", width)
    if sparsity > 0:
        gate = b.above_cutoff(gate, NormalDist().inv_cdf(sparsity))
    return b.linear(b.gated_activation(gate, up, cfg.hidden_act), p / "down_proj", cfg.hidden_size)


def _width(cfg: ModelConfig, layer: int) -> int:
    """Return the width of an MLP: config.json states one, or that of each layer."""
    stated = cfg.get("intermediate_sizes")
    if not isinstance(stated, list):
        return cfg.size("intermediate_sizes")
    width = _of_layer(cfg, "intermediate_size", cfg.integers("intermediate_sizes"), layer)
    return Fields({"intermediate_size": width}).size("intermediate_size")


def _sparsity(cfg: ModelConfig, layer: int) -> float:
    """Return the share of activations of a layer that become zero."""
    stated = cfg.get("activation_sparsity_pattern")
    if stated is None:
        return _SPARSE_SHARE if layer < _SPARSE_LAYERS < cfg.num_hidden_layers else 0.0
    if not isinstance(stated, list):
        raise ConfigError(f"config.json: activation_sparsity_pattern = {quoted(stated)} is not a list")
    share = _of_layer(cfg, "activation_sparsity_pattern", tuple(stated), layer)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"config.json: activation_sparsity_pattern: {quoted(share)} is not a share")
    return float(share)


def _of_layer(cfg: ModelConfig, name: str, values: tuple[Any, ...], layer: int) -> Any:
    if len(values) != cfg.num_hidden_layers:
        raise ConfigError(f"config.json: {name} has {len(values)} values for {cfg.num_hidden_layers} layers")
    return values[layer]


def _logits(b: Builder, cfg: ModelConfig, streams: list[Value], w: Names) -> Value:
    """Return the logits of the mean of all streams."""
    total = first = streams[0]
    for i, stream in enumerate(streams[1:]):
        y = b.linear(stream, w / f"model.altup_unembed_projections.{i}", cfg.hidden_size)
        total = b.add(total, b.match_magnitude(y, first, _LEAST_SQUARE))
    x = b.rms_norm(b.scale(total, 1 / len(streams)), w / "model.norm", cfg.norm_eps)
    cap = cfg.optional_positive("final_logit_softcapping")
    logits = b.linear(x, w / cfg.lm_head, cfg.vocab_size)
    return b.soft_cap(logits, cap) if cap else logits
