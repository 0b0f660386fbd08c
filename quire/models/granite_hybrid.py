"""Granite 4 (IBM): Granite's block with Mamba-2 in place of attention in most layers, and experts or not."""

from __future__ import annotations

from quire.errors import ConfigError, quoted
from quire.models.config import FULL, LINEAR, SLIDING, ModelConfig
from quire.models.granite import experts_and_shared
from quire.models.layers import embed_tokens, head, project_qkv, rotate
from quire.models.mamba import MAMBA, mixer, mixer_of
from quire.program import Builder, Names, Value

ATTENTION = "attention"  # the older name of full attention
HYBRID = (MAMBA, LINEAR, ATTENTION)


def granite_hybrid(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    kinds, residual = _kinds(cfg), cfg.number("residual_multiplier")
    x = b.scale(embed_tokens(b, cfg, w), cfg.number("embedding_multiplier"))
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        h = mamba(b, cfg, h, p / "mamba") if kinds[i] in (MAMBA, LINEAR) else _attention(b, cfg, h, p)
        x = b.add(x, b.scale(h, residual))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, b.scale(experts_and_shared(b, cfg, h, p), residual))
    return b.scale(head(b, cfg, x, w), 1.0 / cfg.positive("logits_scaling"))


def _kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the type of each layer: Mamba unless stated otherwise."""
    kinds = cfg.layer_types if cfg.get("layer_types") else (MAMBA,) * cfg.num_hidden_layers
    if SLIDING in kinds:
        known = ", ".join((*HYBRID, FULL))
        raise ConfigError(f"config.json: layer_types = {quoted(list(kinds))}", f"known are {known}")
    return kinds


def mamba(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    inner = int(cfg.size("mamba_expand") * cfg.hidden_size)
    m = mixer_of(cfg, inner, out_bias=cfg.flag("mamba_proj_bias"))

    def gated(y: Value, gate: Value) -> Value:
        return b.gated_rms_norm(y, gate, p / "norm", cfg.norm_eps, gate_first=True, groups=m.groups)

    return mixer(b, h, p, m, gated)


def _attention(b: Builder, cfg: ModelConfig, h: Value, layer: Names) -> Value:
    """Attend, without positions unless they are asked for."""
    p, bias = layer / "self_attn", cfg.flag("attention_bias")
    q, k, v = project_qkv(b, cfg, h, p, bias=bias)
    if cfg.get("position_embedding_type") == "rope":
        q, k = rotate(b, q, k, cfg.rope())
    h = b.attention(q, k, v, scale=cfg.number("attention_multiplier"))
    return b.linear(h, p / "o_proj", cfg.hidden_size, bias=bias)
