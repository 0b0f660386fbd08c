"""Llama-Nemotron Super, Ultra and 51B (arXiv:2505.00949): Llama's layers, of which a search took parts away.

Each layer states its heads of keys and the width of its MLP; either part may also be one matrix, or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.errors import ConfigError, quoted
from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

_ABSENT, _ONE_MATRIX = "no_op", "replace_with_linear"
_READ = ("n_heads_in_group", "ffn_mult", "sparsify")  # the last changes training alone
_STEP = 256  # widths of MLPs are multiples of this
_DIGITS = 6  # to which ffn_mult is rounded


def deci(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope = cfg.rope()
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        attention, mlp = _part(cfg, i, "attention"), _part(cfg, i, "ffn")
        if not attention.flag(_ABSENT):
            h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
            x = b.add(x, _attention(b, cfg, attention, h, p / "self_attn", rope))
        if not mlp.flag(_ABSENT):
            h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
            x = b.add(x, _mlp(b, cfg, mlp, h, p / "mlp"))
    return head(b, cfg, x, w)


def _part(cfg: ModelConfig, layer: int, name: str) -> Fields:
    """Return what block_configs states of the attention or the MLP of a layer."""
    blocks = cfg.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != cfg.num_hidden_layers:
        problem = f"block_configs does not state each of {cfg.num_hidden_layers} layers"
        raise ConfigError(f"config.json: {problem}", "older DeciLM models are not supported")
    block = blocks[layer]
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise ConfigError(f"config.json: block_configs states no {name} of layer {layer}")
    for key, value in part.items():
        if value and key not in (_ABSENT, _ONE_MATRIX, *_READ):
            raise ConfigError(
                f"config.json: {quoted(key)} = {quoted(value)} in block_configs is not supported"
            )
    return Fields(part)


def _attention(b: Builder, cfg: ModelConfig, own: Fields, h: Value, p: Names, rope: Rope) -> Value:
    if own.flag(_ONE_MATRIX):
        return b.linear(h, p / "linear_attn", cfg.hidden_size)
    each, bias = own.size("n_heads_in_group"), cfg.flag("attention_bias")
    groups, rest = divmod(cfg.num_attention_heads, each)
    if rest:
        raise ConfigError(f"config.json: n_heads_in_group = {each} does not divide the number of heads")
    q, k, v = project_qkv(b, replace(cfg, num_key_value_heads=groups), h, p, bias=bias)
    q, k = rotate(b, q, k, rope)
    return b.linear(b.attention(q, k, v), p / "o_proj", cfg.hidden_size, bias=bias)


def _mlp(b: Builder, cfg: ModelConfig, own: Fields, h: Value, p: Names) -> Value:
    if own.flag(_ONE_MATRIX):
        return b.linear(h, p / "linear_mlp", cfg.hidden_size)
    width = int(2 * round(own.positive("ffn_mult"), _DIGITS) * cfg.hidden_size / 3)
    return gated_mlp(b, cfg, h, p, cfg.flag("mlp_bias"), max(-(-width // _STEP), 1) * _STEP)
