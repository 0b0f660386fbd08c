"""GTE (arXiv:2407.19669) and Snowflake's Arctic Embed on it: BERT's layers with rotary positions, and an MLP
with a gate. Checkpoints call the architecture New or Gte.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError, quoted
from quire.models.config import Fields, ModelConfig
from quire.models.pooling import attend_both, embed_segments
from quire.models.purpose import Pooling
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

_W = Names("")

DEFAULTS = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "rms_norm_eps": 1e-12,
    "eos_token_id": None,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "pack_qkv": True,
}
ONLY = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "logn_attention_scale": (False, None),
}


def gte(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    hidden, w, rope = cfg.hidden_size, _W / "embeddings", _rope(cfg)
    x = b.embed(w / "word_embeddings", cfg.vocab_size, hidden)
    if cfg.number("type_vocab_size", 0):
        types, count = w / "token_type_embeddings", cfg.size("type_vocab_size")
        separator = pooling.separator if count > 1 else -1
        x = b.add(x, embed_segments(b, types, count, hidden, separator))
    x = b.layer_norm(x, w / "LayerNorm", cfg.norm_eps)
    for i in range(cfg.num_hidden_layers):
        p = _W / f"encoder.layer.{i}"
        x = b.layer_norm(b.add(_attend(b, cfg, x, p / "attention", rope), x), p / "attn_ln", cfg.norm_eps)
        packed = b.linear(x, p / "mlp.up_gate_proj", 2 * cfg.intermediate_size)
        up, gate = (b.slice(packed, n * cfg.intermediate_size, cfg.intermediate_size) for n in range(2))
        h = b.gated_activation(gate, up, cfg.hidden_act)
        h = b.linear(h, p / "mlp.down_proj", hidden, bias=True)
        x = b.layer_norm(b.add(h, x), p / "mlp_ln", cfg.norm_eps)
    return x


def _attend(b: Builder, cfg: ModelConfig, x: Value, p: Names, rope: Rope) -> Value:
    hidden, heads = cfg.hidden_size, (cfg.num_attention_heads, cfg.head_dim)
    if cfg.flag("pack_qkv"):
        packed = b.linear(x, p / "qkv_proj", 3 * hidden, bias=True)
        q, k, v = (b.slice(packed, n * hidden, heads) for n in range(3))
    else:
        q, k, v = (b.linear(x, p / f"{part}_proj", heads, bias=True) for part in "qkv")
    h = attend_both(b, b.rotary(q, rope), b.rotary(k, rope), v)
    return b.linear(h, p / "o_proj", hidden, bias=True)


def _rope(cfg: ModelConfig) -> Rope:
    """Return the rotary embedding; NTK scaling by s of d numbers is interpolation by s**(2/d) and a base s
    times as large.
    """
    given = cfg.get("rope_scaling")
    if given is None:
        return cfg.rope()
    if not isinstance(given, Mapping) or given.get("type") != "ntk" or given.get("mixed_b") is not None:
        problem = f"rope_scaling = {quoted(given)} is not supported"
        raise ConfigError(f"config.json: {problem}", "known is the type ntk, without mixed_b")
    factor = Fields(given).positive("factor")
    base = factor * cfg.number("rope_theta")
    return cfg.rope({"rope_type": "linear", "factor": factor ** (2 / cfg.head_dim), "rope_theta": base})
