"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): Llama's block with packed projections."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, packed_gated_mlp, rotate, unpack_qkv
from quire.program import Builder, Names, Value
from quire.program.rope import Rope


def phi3(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    width = (cfg.num_attention_heads + 2 * cfg.num_key_value_heads) * cfg.head_dim
    rope = _rope(cfg)
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = unpack_qkv(b, cfg, b.linear(h, p / "self_attn.qkv_proj", width))
        q, k = rotate(b, q, k, rope)
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, packed_gated_mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _rope(cfg: ModelConfig) -> Rope:
    """Read rope parameters: none or longrope, which early checkpoints call su or yarn."""
    stated = cfg.rope_parameters()
    if (stated.get("rope_type") or stated.get("type")) in ("su", "yarn"):
        stated = {**stated, "rope_type": "longrope"}
    rope = cfg.rope(stated)
    if rope.rope_type not in ("default", "longrope"):
        raise ConfigError(
            f"config.json: rope scaling {rope.rope_type!r} is not one of Phi-3, only longrope is"
        )
    return rope
