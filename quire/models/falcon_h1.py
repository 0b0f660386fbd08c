"""Falcon-H1 (arXiv:2507.22448): attention beside Mamba-2 in each layer, constant multipliers."""

from __future__ import annotations

from quire.errors import ConfigError, quoted
from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, project_qkv, rotate
from quire.models.mamba import Mixer, mixer, mixer_of
from quire.program import Builder, Names, Value


def falcon_h1(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    inner = cfg.optional_size("mamba_d_ssm") or cfg.size("mamba_expand") * cfg.hidden_size
    m = mixer_of(cfg, inner, out_bias=cfg.flag("projectors_bias"))
    x = b.scale(embed_tokens(b, cfg, w), cfg.number("embedding_multiplier"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        mixed = b.scale(_mamba(b, cfg, h, p / "mamba", m), cfg.number("ssm_out_multiplier"))
        attended = b.scale(_attention(b, cfg, h, p / "self_attn"), cfg.number("attention_out_multiplier"))
        x = b.add(x, b.add(mixed, attended))
        h = b.rms_norm(x, p / "pre_ff_layernorm", cfg.norm_eps)
        x = b.add(x, _mlp(b, cfg, h, p / "feed_forward"))
    x = b.rms_norm(b.sampled_rows(x), w / "model.final_layernorm", cfg.norm_eps)
    return b.scale(b.linear(x, w / cfg.lm_head, cfg.vocab_size), cfg.number("lm_head_multiplier"))


def _mamba(b: Builder, cfg: ModelConfig, h: Value, p: Names, m: Mixer) -> Value:
    """Return the mixer's output; its gate, x, B, C and step have a multiplier each."""
    factors = _multipliers(cfg, "ssm_multipliers", 5)
    parts = tuple(zip((m.inner, m.inner, m.shared, m.shared, m.heads), factors, strict=True))
    first = not cfg.flag("mamba_norm_before_gate")

    def gated(y: Value, gate: Value) -> Value:
        if not cfg.flag("mamba_rms_norm"):
            return b.gated_activation(gate, y, "silu")
        return b.gated_rms_norm(y, gate, p / "norm", cfg.norm_eps, gate_first=first, groups=m.groups)

    h = b.scale(h, cfg.number("ssm_in_multiplier"))
    return mixer(b, h, p, m, gated, lambda packed: b.scale_parts(packed, parts))


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, b.scale(h, cfg.number("attention_in_multiplier")), p, bias=bias)
    q, k = rotate(b, q, b.scale(k, cfg.number("key_multiplier")), cfg.rope())
    return b.linear(b.attention(q, k, v), p / "o_proj", cfg.hidden_size, bias=bias)


def _mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    bias, inner = cfg.flag("mlp_bias"), cfg.intermediate_size
    of_gate, of_down = _multipliers(cfg, "mlp_multipliers", 2)
    gate = b.scale(b.linear(h, p / "gate_proj", inner, bias=bias), of_gate)
    h = b.gated_activation(gate, b.linear(h, p / "up_proj", inner, bias=bias), cfg.hidden_act)
    return b.scale(b.linear(h, p / "down_proj", cfg.hidden_size, bias=bias), of_down)


def _multipliers(cfg: ModelConfig, name: str, count: int) -> tuple[float, ...]:
    """Return so many numbers, all one if config.json has none."""
    stated = cfg.get(name)
    if stated is None:
        return (1.0,) * count
    if not isinstance(stated, list) or len(stated) != count:
        raise ConfigError(f"config.json: {name} = {quoted(stated)} is not a list of {count} numbers")
    return tuple(Fields({name: factor}).number(name) for factor in stated)
