"""StarCoder2 (arXiv:2402.19173): LayerNorm, biases everywhere, an MLP without gate."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, project_qkv, rotate
from quire.program import Builder, Names, Value


def starcoder2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("use_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.layer_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        h = b.activation(b.linear(h, p / "mlp.c_fc", cfg.intermediate_size, bias=bias), cfg.hidden_act)
        x = b.add(x, b.linear(h, p / "mlp.c_proj", cfg.hidden_size, bias=bias))
    x = b.layer_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)
