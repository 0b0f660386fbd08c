"""OLMo 2 (arXiv:2501.00656) and 3 (2512.13961): norms only after each part, and over the whole width of
queries and keys; OLMo 3 has sliding windows, and a scaled rope only in the other layers.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.models.config import ModelConfig
from quire.models.gemma import rope_of_type
from quire.models.layers import embed_tokens, gated_mlp, head, rotate
from quire.models.moe import wide_norm_qkv
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

Ropes = Callable[[ModelConfig, int], Rope]  # of each layer


def olmo2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda cfg, layer: cfg.rope())


def olmo3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda cfg, layer: rope_of_type(cfg, cfg.layer_types[layer], "rope_theta"))


def _decoder(b: Builder, cfg: ModelConfig, w: Names, ropes: Ropes) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        x = full_layer(b, cfg, x, w / f"model.layers.{i}", ropes(cfg, i), cfg.window(i))
    return head(b, cfg, x, w)


def full_layer(
    b: Builder, cfg: ModelConfig, x: Value, p: Names, rope: Rope | None, window: int | None = None
) -> Value:
    bias = cfg.flag("attention_bias")
    q, k, v = wide_norm_qkv(b, cfg, x, p / "self_attn", bias)
    if rope is not None:
        q, k = rotate(b, q, k, rope)
    h = b.linear(b.attention(q, k, v, window=window), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
    x = b.add(x, b.rms_norm(h, p / "post_attention_layernorm", cfg.norm_eps))
    h = gated_mlp(b, cfg, x, p / "mlp")
    return b.add(x, b.rms_norm(h, p / "post_feedforward_layernorm", cfg.norm_eps))
