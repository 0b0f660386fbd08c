"""OLMo 2 (arXiv:2501.00656) and 3 (2512.13961): norms only after each part, and over the whole width of
queries and keys; OLMo 3 has sliding windows, and a scaled rope only in the other layers. FlexOlmo
(2507.07024) is OLMo 2 with experts.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.models.config import ModelConfig
from quire.models.gemma import rope_of_type
from quire.models.layers import embed_tokens, gated_mlp, head, rotate
from quire.models.moe import expert_stack, routing, wide_norm_qkv
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

Mlp = Callable[[Builder, ModelConfig, Value, Names], Value]
Ropes = Callable[[ModelConfig, int], Rope]  # of each layer


def olmo2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda cfg, layer: cfg.rope())


def olmo3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda cfg, layer: rope_of_type(cfg, cfg.layer_types[layer], "rope_theta"))


def flex_olmo(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda cfg, layer: cfg.rope(), _experts)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.intermediate_size)
    return b.experts(h, scores, experts, **routing(cfg))


def _decoder(b: Builder, cfg: ModelConfig, w: Names, ropes: Ropes, mlp: Mlp = gated_mlp) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        x = full_layer(b, cfg, x, w / f"model.layers.{i}", ropes(cfg, i), cfg.window(i), mlp)
    return head(b, cfg, x, w)


def full_layer(
    b: Builder,
    cfg: ModelConfig,
    x: Value,
    p: Names,
    rope: Rope | None,
    window: int | None = None,
    mlp: Mlp = gated_mlp,
) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = wide_norm_qkv(b, cfg, x, p / "self_attn", bias)
    if rope is not None:
        q, k = rotate(b, q, k, rope)
    h = b.linear(b.attention(q, k, v, window=window), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
    x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
    h = mlp(b, cfg, x, p / "mlp")
    return b.add(x, b.rms_norm(h, p / "post_feedforward_layernorm", cfg.norm_eps))
