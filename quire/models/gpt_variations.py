"""Relatives of GPT-2: SantaCoder and StarCoder (arXiv:2301.03988, 2305.06161), whose heads share one of keys;
GPT-Neo, with a window in some layers; GPT-J and CodeGen (2203.13474), which rotate a part of each head.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice

from quire.errors import ConfigError, quoted
from quire.models.config import FULL, MAX_LAYERS, SLIDING, Fields, ModelConfig
from quire.models.gpt2 import gpt2_head, placed_tokens, score_scale
from quire.models.layers import grouped_qkv, plain_mlp, project_qkv, rotate
from quire.program import Builder, Names, Rows, Value
from quire.program.rope import rope_from_config

_KINDS = {"global": FULL, "local": SLIDING}
_THETA = 10_000.0
_PARTITIONS = 4  # of CodeGen's matrix, each with queries, values and keys


def gpt_bigcode(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    cfg = replace(cfg, num_key_value_heads=1) if cfg.flag("multi_query") else cfg
    x = placed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.layer_norm(x, p / "ln_1", cfg.norm_eps)
        q, k, v = grouped_qkv(b, cfg, h, p / "attn.c_attn", True)
        a = b.attention(q, k, v, scale=score_scale(cfg))
        x = b.add(x, b.linear(a, p / "attn.c_proj", cfg.hidden_size, bias=True))
        h = b.layer_norm(x, p / "ln_2", cfg.norm_eps)
        x = b.add(x, plain_mlp(b, cfg, h, p / "mlp", True, ("c_fc", "c_proj")))
    return gpt2_head(b, cfg, x, w)


def gpt_neo(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = placed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.layer_norm(x, p / "ln_1", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "attn.attention")
        a = b.attention(q, k, v, scale=1.0, window=cfg.window(i))
        x = b.add(x, b.linear(a, p / "attn.attention.out_proj", cfg.hidden_size, bias=True))
        h = b.layer_norm(x, p / "ln_2", cfg.norm_eps)
        x = b.add(x, plain_mlp(b, cfg, h, p / "mlp", True, ("c_fc", "c_proj")))
    return gpt2_head(b, cfg, x, w)


def layers_of_gpt_neo(fields: Fields) -> tuple[str, ...]:
    """Return the type of each layer: listed, or [types, how often] one after the other."""
    count, listed = fields.size("num_hidden_layers", MAX_LAYERS), fields.get("attention_layers")
    stated = fields.get("attention_types") or [[["global", "local"], 12]]
    try:
        repeated = (types[:MAX_LAYERS] * min(times, MAX_LAYERS) for types, times in stated)
        kinds = listed or islice(chain.from_iterable(repeated), count + 1)
        found = tuple(_KINDS[kind] for kind in kinds)
    except (KeyError, TypeError, ValueError):
        found = ()
    if len(found) != count:
        what = quoted(listed or stated)
        raise ConfigError(f"config.json: {what} does not tell global or local of each of {count} layers")
    return found


def gptj(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _beside(b, cfg, w, fused=False)


def codegen(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _beside(b, cfg, w, fused=True)


def _beside(b: Builder, cfg: ModelConfig, w: Names, fused: bool) -> Value:
    """Record layers of attention and an MLP beside each other, on one norm."""
    if cfg.tie_word_embeddings:
        raise ConfigError("config.json: tie_word_embeddings is not supported: the head has a bias")
    dim, longest = cfg.size("rotary_dim"), cfg.max_position_embeddings
    rope = rope_from_config(None, dim=dim, theta=_THETA, max_position=longest, interleaved=True)
    x = b.embed(w / "transformer.wte", cfg.vocab_size, cfg.hidden_size)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.layer_norm(x, p / "ln_1", cfg.norm_eps)
        q, k, v = _partitioned(b, cfg, h, p / "attn") if fused else project_qkv(b, cfg, h, p / "attn")
        q, k = rotate(b, q, k, rope)
        a = b.linear(b.attention(q, k, v), p / "attn.out_proj", cfg.hidden_size)
        x = b.add(x, b.add(a, plain_mlp(b, cfg, h, p / "mlp", True, ("fc_in", "fc_out"))))
    return gpt2_head(b, cfg, x, w, bias=True)


def _partitioned(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> tuple[Value, Value, Value]:
    """Return queries, keys and values from one matrix, which has a part of the heads of each in turns."""
    heads, dim = cfg.num_attention_heads, cfg.head_dim
    each, rest = divmod(heads, _PARTITIONS)
    if rest:
        raise ConfigError(f"config.json: {heads} heads do not make {_PARTITIONS} equal parts")
    width = each * dim

    def some(part: str, place: int) -> Value:
        rows = Rows(3 * width, ((place * width, width),))
        return b.linear(h, p / "qkv_proj", (heads, dim), rows=rows, part=part)

    return some("query", 0), some("key", 2), some("value", 1)
