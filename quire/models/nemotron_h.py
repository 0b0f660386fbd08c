"""Nemotron-H and Nemotron 3 (arXiv:2504.03624): each layer is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.errors import ConfigError, quoted
from quire.models.config import FULL, LINEAR, MAX_HEAD_DIM, MAX_KERNEL, MAX_LAYERS, Fields, ModelConfig
from quire.models.layers import project_qkv
from quire.models.mamba import MAMBA, Mixer, mixer
from quire.models.moe import biased_routing
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import ExpertWeights

MLP, MOE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
_OLDER = {MAMBA: LINEAR, "attention": FULL}
_UNSTATED = (LINEAR, MOE, FULL, MLP)


def layers_of(fields: Fields) -> tuple[str, ...]:
    """Return the type of each layer, from a list or from a pattern with a letter for each."""
    stated, letters = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if stated is None and letters is None:
        return _UNSTATED
    if stated is None:
        known, kinds = _LETTERS, letters
    else:
        known, kinds = {kind: kind for kind in _UNSTATED} | _OLDER, stated
    if not isinstance(kinds, str if stated is None else list) or not 0 < len(kinds) <= MAX_LAYERS:
        raise ConfigError(f"config.json: {quoted(kinds)} does not tell the types of the layers")
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in known]:
        raise ConfigError(f"config.json: unknown type of layer {quoted(unknown[0])}", f"known: {[*known]}")
    return tuple(known[kind] for kind in kinds)


def nemotron_h(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    m = _mixer(cfg)
    record: dict[str, Callable[[Value, Names], Value]] = {
        LINEAR: lambda h, p: _mamba(b, cfg, h, p, m),
        FULL: lambda h, p: _attention(b, cfg, h, p),
        MLP: lambda h, p: _mlp(b, cfg, h, p, cfg.intermediate_size),
        MOE: lambda h, p: _experts(b, cfg, h, p),
    }
    x = b.embed(w / "backbone.embeddings", cfg.vocab_size, cfg.hidden_size)
    for i, kind in enumerate(cfg.layer_types):
        p = w / f"backbone.layers.{i}"
        h = b.rms_norm(x, p / "norm", cfg.norm_eps)
        x = b.add(x, record[kind](h, p / "mixer"))
    x = b.rms_norm(b.sampled_rows(x), w / "backbone.norm_f", cfg.norm_eps)
    return b.linear(x, w / "lm_head", cfg.vocab_size)


def _mixer(cfg: ModelConfig) -> Mixer:
    """Return the sizes of the mixers; steps are at least time_step_min, as transformers has it."""
    bias = cfg.flag("use_bias")
    return Mixer(
        heads=cfg.size("mamba_num_heads"),
        dim=cfg.size("mamba_head_dim", MAX_HEAD_DIM),
        groups=cfg.size("n_groups"),
        state_dim=cfg.size("ssm_state_size"),
        kernel=cfg.size("conv_kernel", MAX_KERNEL),
        activation=_name(cfg, "mamba_hidden_act"),
        limits=(cfg.number("time_step_min", 0), math.inf),
        in_bias=bias,
        out_bias=bias,
        conv_bias=cfg.flag("use_conv_bias"),
    )


def _name(cfg: ModelConfig, key: str) -> str:
    value = cfg.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"config.json: {key} = {quoted(value)} is not a name")
    return value


def _mamba(b: Builder, cfg: ModelConfig, h: Value, p: Names, m: Mixer) -> Value:
    def gated(y: Value, gate: Value) -> Value:
        return b.gated_rms_norm(y, gate, p / "norm", cfg.norm_eps, gate_first=True, groups=m.groups)

    return mixer(b, h, p, m, gated)


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Attend without positions, which the Mamba layers tell."""
    q, k, v = project_qkv(b, cfg, h, p)
    return b.linear(b.attention(q, k, v), p / "o_proj", cfg.hidden_size)


def _mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names, inner: int) -> Value:
    bias = cfg.flag("mlp_bias")
    h = b.activation(b.linear(h, p / "up_proj", inner, bias=bias), cfg.hidden_act)
    return b.linear(h, p / "down_proj", cfg.hidden_size, bias=bias)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Mix experts without gates, of the hidden values or of a latent of them, and add the shared one."""
    scores, latent = b.linear(h, p / "gate", cfg.num_experts), cfg.optional_size("moe_latent_size")
    bias, x = cfg.flag("mlp_bias"), h
    if latent:
        x = b.linear(h, p / "fc1_latent_proj", latent, bias=bias)
    experts = _stack(cfg, p / "experts", x.width)
    mixed = b.experts(x, scores, experts, routing=biased_routing(cfg, p), activation=cfg.hidden_act)
    if latent:
        mixed = b.linear(mixed, p / "fc2_latent_proj", cfg.hidden_size, bias=bias)
    inner = cfg.size("moe_shared_expert_intermediate_size")
    return b.add(mixed, _mlp(b, cfg, h, p / "shared_experts", inner))


def _stack(cfg: ModelConfig, p: Names, width: int) -> ExpertWeights:
    """Return experts stored as separate matrices, stacked at load."""

    def stack(part: str, rows: int, columns: int) -> WeightSpec:
        count = cfg.num_experts
        sources = tuple(p / f"{expert}.{part}.weight" for expert in range(count))
        return WeightSpec(p / f"{part}.weight", (count, rows, columns), sources, quantizable=True)

    inner = cfg.size("moe_intermediate_size")
    return ExpertWeights(None, stack("up_proj", inner, width), stack("down_proj", width, inner))
