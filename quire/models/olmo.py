"""OLMo 1 (arXiv:2402.00838): Llama's block with a LayerNorm that has no weights."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value

_EPS = 1e-5  # config.json has none


def olmo(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, None, _EPS)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.attention(q, k, v)
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        x = b.add(x, gated_mlp(b, cfg, b.layer_norm(x, None, _EPS), p / "mlp"))
    x = b.layer_norm(b.sampled_rows(x), None, _EPS)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)
