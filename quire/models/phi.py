"""Phi 1, 1.5 and 2 (arXiv:2306.11644, 2309.05463): attention and an MLP without gate in parallel on one
LayerNorm, half of each head rotated, biases everywhere.
"""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, plain_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value


def phi(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    if cfg.tie_word_embeddings:
        raise ConfigError("config.json: tie_word_embeddings is not supported: the head has a bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=True)
        if cfg.flag("qk_layernorm"):
            q = b.layer_norm(q, p / "self_attn.q_layernorm", cfg.norm_eps)
            k = b.layer_norm(k, p / "self_attn.k_layernorm", cfg.norm_eps)
        q, k = rotate(b, q, k, cfg.rope())
        a = b.linear(b.attention(q, k, v), p / "self_attn.dense", cfg.hidden_size, bias=True)
        x = b.add(x, b.add(a, plain_mlp(b, cfg, h, p / "mlp", True, ("fc1", "fc2"))))
    x = b.layer_norm(b.sampled_rows(x), w / "model.final_layernorm", cfg.norm_eps)
    return b.linear(x, w / "lm_head", cfg.vocab_size, bias=True)
