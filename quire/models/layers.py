"""Layers common to most decoders, one formula each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config import Fields, ModelConfig
from quire.program import Builder, Names, Rows, Value
from quire.program.rope import Rope

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")  # the matrices of an MLP with a gate


def project_qkv(
    b: Builder, cfg: ModelConfig, h: Value, p: Names, bias: bool = False
) -> tuple[Value, Value, Value]:
    """Return queries [T, heads, dim], keys and values [T, kv_heads, dim], from three matrices."""
    q = b.linear(h, p / "q_proj", (cfg.num_attention_heads, cfg.head_dim), bias=bias)
    k = b.linear(h, p / "k_proj", (cfg.num_key_value_heads, cfg.head_dim), bias=bias)
    v = b.linear(h, p / "v_proj", (cfg.num_key_value_heads, cfg.head_dim), bias=bias)
    return q, k, v


def unpack_qkv(b: Builder, cfg: ModelConfig, packed: Value) -> tuple[Value, Value, Value]:
    """Return the same from one packed projection, in the order queries, keys, values."""
    heads, groups, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q = b.slice(packed, 0, (heads, dim))
    k = b.slice(packed, heads * dim, (groups, dim))
    v = b.slice(packed, (heads + groups) * dim, (groups, dim))
    return q, k, v


def grouped_qkv(b: Builder, cfg: ModelConfig, h: Value, p: Names, bias: bool) -> tuple[Value, Value, Value]:
    """Return the same from one matrix that has the rows of each key head together: queries, key, value."""
    groups, dim = cfg.num_key_value_heads, cfg.head_dim
    each = cfg.num_attention_heads // groups

    def some(part: str, first: int, count: int) -> Value:
        rows = Rows((each + 2) * dim, ((first * dim, count * dim),))
        return b.linear(h, p, (groups * count, dim), bias=bias, rows=rows, part=part)

    return some("query", 0, each), some("key", each, 1), some("value", each + 1, 1)


def rotate(b: Builder, q: Value, k: Value, rope: Rope) -> tuple[Value, Value]:
    return b.rotary(q, rope), b.rotary(k, rope)


def query_growth(cfg: ModelConfig, given: Mapping[str, Any]) -> tuple[float, int]:
    """Return beta and period of Builder.scale_by_position, from the parameters of the rope (Mistral)."""
    fields = Fields(given)
    period = cfg.optional_size("original_max_position_embeddings")
    return fields.number("llama_4_scaling_beta"), period or fields.size("original_max_position_embeddings")


def convolved_qkv(
    b: Builder, cfg: ModelConfig, h: Value, p: Names, keys: int, values: int, kernel: int
) -> tuple[Value, Value, Value]:
    """Return queries and keys [T, keys] and values [T, values] of a recurrence, each after a convolution."""
    q, k, v = (
        b.short_convolution(
            b.linear(h, p / f"{name}_proj", width), p / f"{name}_conv1d", kernel, activation=cfg.hidden_act
        )
        for name, width in (("q", keys), ("k", keys), ("v", values))
    )
    return q, k, v


def gated_mlp(
    b: Builder,
    cfg: ModelConfig,
    h: Value,
    p: Names,
    bias: bool = False,
    width: int | None = None,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Value:
    """Return down(activation(gate h) * up h); `width` instead of intermediate_size."""
    width = width or cfg.intermediate_size
    gate = b.linear(h, p / names[0], width, bias=bias)
    up = b.linear(h, p / names[1], width, bias=bias)
    inner = b.gated_activation(gate, up, cfg.hidden_act)
    return b.linear(inner, p / names[2], cfg.hidden_size, bias=bias)


def plain_mlp(
    b: Builder,
    cfg: ModelConfig,
    h: Value,
    p: Names,
    bias: bool,
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> Value:
    """Return down(activation(up h)), of an MLP without gate."""
    inner = b.activation(b.linear(h, p / names[0], cfg.intermediate_size, bias=bias), cfg.hidden_act)
    return b.linear(inner, p / names[1], cfg.hidden_size, bias=bias)


def packed_gated_mlp(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return the same with gate and up in one matrix, gate first."""
    packed = b.linear(h, p / "gate_up_proj", 2 * cfg.intermediate_size)
    gate = b.slice(packed, 0, cfg.intermediate_size)
    up = b.slice(packed, cfg.intermediate_size, cfg.intermediate_size)
    return b.linear(b.gated_activation(gate, up, cfg.hidden_act), p / "down_proj", cfg.hidden_size)


def embed_tokens(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return b.embed(w / "model.embed_tokens", cfg.vocab_size, cfg.hidden_size, cfg.tie_word_embeddings)


def head(b: Builder, cfg: ModelConfig, x: Value, w: Names, norm_offset: float = 0.0) -> Value:
    """Return the logits of the rows that need them: final norm, output matrix."""
    x = b.rms_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps, norm_offset)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)
