"""Ling and Ring 1 and 2.0 (arXiv:2503.05139, 2510.22115): one matrix of queries, keys and values, and the
mixture of DeepSeek, in 2.0 with its later router and half of each head rotated.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.deepseek import Router, experts_or_mlp
from quire.models.layers import rotate, unpack_qkv
from quire.models.moe import pair_routing
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing


def bailing(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _layers(b, cfg, w, _softmax_routing)


def bailing2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _layers(b, cfg, w, _sigmoid_routing)


def _softmax_routing(cfg: ModelConfig, p: Names) -> Routing:
    return Routing(cfg.size("num_experts_per_tok"), normalized=cfg.flag("norm_topk_prob"))


def _sigmoid_routing(cfg: ModelConfig, p: Names) -> Routing:
    name = p / "gate.expert_bias"
    bias = WeightSpec(name, (cfg.num_experts,), (name,))
    return replace(pair_routing(cfg, p), affinity="sigmoid", bias=bias)


def _layers(b: Builder, cfg: ModelConfig, w: Names, routing: Router) -> Value:
    inner = cfg.size("moe_intermediate_size")
    if (shared := cfg.optional_size("moe_shared_expert_intermediate_size") or inner) != inner:
        what = f"moe_shared_expert_intermediate_size = {shared:,} is not moe_intermediate_size = {inner:,}"
        raise ConfigError(f"config.json: {what}, which is not supported")
    table, tied, rope = w / "model.word_embeddings", cfg.tie_word_embeddings, cfg.rope()
    x = b.embed(table, cfg.vocab_size, cfg.hidden_size, tied)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        own, bias = p / "attention", cfg.flag("use_bias")
        width = (cfg.num_attention_heads + 2 * cfg.num_key_value_heads) * cfg.head_dim
        packed = b.linear(h, own / "query_key_value", width, bias=bias or cfg.flag("use_qkv_bias"))
        q, k, v = unpack_qkv(b, cfg, packed)
        if cfg.flag("use_qk_norm"):
            q = b.rms_norm(q, own / "query_layernorm", cfg.norm_eps)
            k = b.rms_norm(k, own / "key_layernorm", cfg.norm_eps)
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), own / "dense", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, experts_or_mlp(b, cfg, i, h, p / "mlp", routing))
    x = b.rms_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, table if tied else w / "lm_head", cfg.vocab_size)
