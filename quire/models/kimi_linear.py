"""Kimi Linear (Moonshot AI, arXiv:2510.26692): delta rules that decay by channel between layers of DeepSeek's
latent attention, without positions; DeepSeek-V3's experts.
"""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.config import FULL, LINEAR, MAX_HEAD_DIM, MAX_KERNEL, MAX_LAYERS, Fields, ModelConfig
from quire.models.deepseek import is_sparse, latent_attention, mixture
from quire.models.layers import convolved_qkv, embed_tokens, gated_mlp, head
from quire.models.moe import biased_routing
from quire.program import Builder, Names, Value, WeightSpec

_STATED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
_STATED |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def layers_of(fields: Fields) -> tuple[str, ...]:
    """Return the type of each layer from the lists in linear_attn_config, which count from 1.

    layer_types takes precedence. With neither every fourth has attention, from the fifth on.
    """
    if fields.get("layer_types"):
        return ()
    layers, own = fields.size("num_hidden_layers", MAX_LAYERS), _delta_fields(fields)
    if own.get("full_attn_layers") is None or own.get("kda_layers") is None:
        return tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(layers))
    full, delta = own.integers("full_attn_layers"), own.integers("kda_layers")
    if sorted((*full, *delta)) != list(range(1, layers + 1)):
        problem = f"linear_attn_config does not list each of {layers} layers once"
        raise ConfigError(f"config.json: {problem}")
    return tuple(FULL if i + 1 in full else LINEAR for i in range(layers))


def kimi_linear(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i, kind in enumerate(cfg.layer_types):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        if kind == LINEAR:
            h = _delta_attention(b, cfg, h, p / "self_attn")
        else:
            h = latent_attention(b, cfg, h, p / "self_attn", None)
        x = b.add(x, h)
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        if is_sparse(cfg, i):
            h = mixture(b, cfg, h, p / "block_sparse_moe", biased_routing, ("w1", "w3", "w2"))
        else:
            h = gated_mlp(b, cfg, h, p / "mlp")
        x = b.add(x, h)
    return head(b, cfg, x, w)


def _delta_fields(fields: Fields) -> Fields:
    """Return linear_attn_config, where keys of the delta rule take precedence; it may be empty."""
    stated = fields.get("linear_attn_config") or {}
    if not isinstance(stated, dict):
        raise ConfigError("config.json: linear_attn_config is not an object")
    return Fields(stated)


def _delta_attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return the delta rule over short convolutions, normalized and then gated by a product of low rank."""
    stated = _delta_fields(cfg).values
    own = Fields({**cfg.values, **{name: stated[key] for key, name in _STATED.items() if key in stated}})
    heads, dim = own.size("linear_num_heads"), own.size("linear_head_dim", MAX_HEAD_DIM)
    kernel = own.size("linear_conv_kernel_dim", MAX_KERNEL)
    qkv = convolved_qkv(b, cfg, h, p, heads * dim, heads * dim, kernel)
    decay, gate = (
        b.linear(b.linear(h, p / f"{name}_a_proj", dim), p / f"{name}_b_proj", (heads, dim)) for name in "fg"
    )
    rate = WeightSpec(p / "A_log", (heads,), (p / "A_log",), stored=(1, 1, heads, 1))
    beta = b.linear(h, p / "b_proj", heads)
    out = b.delta_rule(qkv, decay, beta, p, heads, dim, rate=rate)
    normed = b.gated_rms_norm(out, gate, p / "o_norm", cfg.norm_eps, "sigmoid")
    return b.linear(normed, p / "o_proj", cfg.hidden_size)
