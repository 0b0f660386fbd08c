"""Bamba (IBM, 2024): Llama's block with Mamba-2 in place of attention in most layers; in the others half of
each head is rotated.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.granite_hybrid import mamba
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value


def bamba(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    attends, rope = cfg.integers("attn_layer_indices"), cfg.rope()
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        if i in attends:
            bias = cfg.flag("attention_bias")
            q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
            q, k = rotate(b, q, k, rope)
            h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias)
        else:
            h = mamba(b, cfg, h, p / "mamba")
        x = b.add(x, h)
        h = b.rms_norm(x, p / "pre_ff_layernorm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "feed_forward", bias=cfg.flag("mlp_bias")))
    x = b.rms_norm(b.sampled_rows(x), w / "model.final_layernorm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)
