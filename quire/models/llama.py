"""Llama 1, 2, 3 (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral (2310.06825), Qwen2 (2407.10671)
and SmolLM3: pre-norm blocks of attention and a gated MLP, told apart by biases, windows and rope.
"""

from __future__ import annotations

from quire.models.blocks import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.config import ModelConfig
from quire.program import Builder, Names, Value


def llama(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    return _decoder(b, cfg, w, qkv_bias=bias, out_bias=bias)


def qwen2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, qkv_bias=True, out_bias=False)


def _decoder(b: Builder, cfg: ModelConfig, w: Names, *, qkv_bias: bool, out_bias: bool) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=qkv_bias)
        if _rotates(cfg, i):
            q, k = rotate(b, q, k, cfg.rope(cfg.layer_types[i]))
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=out_bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp", bias=cfg.flag("mlp_bias")))
    return head(b, cfg, x, w)


def _rotates(cfg: ModelConfig, layer: int) -> bool:
    """SmolLM3 leaves every fourth layer without positions (no_rope_layers holds a 0 for it)."""
    if rotates := cfg.integers("no_rope_layers"):
        return layer >= len(rotates) or bool(rotates[layer])
    return cfg.get("no_rope_layer_interval") is None or (layer + 1) % cfg.size("no_rope_layer_interval") != 0
