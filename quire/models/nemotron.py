"""Nemotron-4 and Minitron (arXiv:2402.16819, 2407.14679): LayerNorm with a weight that is stored less one, an
MLP without gate, a part of each head rotated. Jais 2 has plain norms and rotates whole heads.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, plain_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value

Norm = Callable[[Builder, ModelConfig, Value, Names], Value]


def nemotron(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, _norm)


def jais2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, lambda b, cfg, x, p: b.layer_norm(x, p, cfg.norm_eps))


def _decoder(b: Builder, cfg: ModelConfig, w: Names, norm: Norm) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = norm(b, cfg, x, p / "input_layernorm")
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v)
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = norm(b, cfg, x, p / "post_attention_layernorm")
        x = b.add(x, plain_mlp(b, cfg, h, p / "mlp", cfg.flag("mlp_bias")))
    x = norm(b, cfg, b.sampled_rows(x), w / "model.norm")
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)


def _norm(b: Builder, cfg: ModelConfig, x: Value, p: Names) -> Value:
    """Return the LayerNorm with a weight of one more than the stored: the plain one is added."""
    return b.add(b.layer_norm(x, p, cfg.norm_eps), b.layer_norm(x, None, cfg.norm_eps))
