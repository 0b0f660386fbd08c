"""NomicBERT (Nomic Embed, arXiv:2402.01613): BERT's layers with rotary positions and a gated activation."""

from __future__ import annotations

from quire.errors import ConfigError, quoted
from quire.models.config import ModelConfig
from quire.models.pooling import attend_both, embed_segments
from quire.models.purpose import Pooling
from quire.program import Builder, Names, Value

_GATES = {"swiglu": "silu", "geglu": "gelu"}
_W = Names("")

DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": None,
    "hidden_act": "gelu",
    "max_position_embeddings": 1024,
    "max_trained_positions": 2048,
    "type_vocab_size": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "rotary_emb_base": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
}
SPELLED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
ONLY = {
    "causal": (False, None),
    "prenorm": (False, None),
    "parallel_block": (False, None),
    "use_rms_norm": (False, None),
    "norm_mlp": (False, None),
    "rotary_emb_fraction": (1,),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "moe_every_n_layers": (0, None),
    "num_experts": (0, None),
}


def nomic_bert(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    hidden, w = cfg.hidden_size, _W / "embeddings"
    x = b.embed(w / "word_embeddings", cfg.vocab_size, hidden)
    types = w / "token_type_embeddings"
    x = b.add(x, embed_segments(b, types, cfg.size("type_vocab_size"), hidden, pooling.separator))
    x = b.layer_norm(x, _W / "emb_ln", cfg.norm_eps)
    for i in range(cfg.num_hidden_layers):
        p = _W / f"encoder.layers.{i}"
        x = b.layer_norm(b.add(_attend(b, cfg, x, p / "attn"), x), p / "norm1", cfg.norm_eps)
        x = b.layer_norm(b.add(_gated_mlp(b, cfg, x, p / "mlp"), x), p / "norm2", cfg.norm_eps)
    return x


def longest(cfg: ModelConfig) -> int:
    """Return the number of positions that the model was trained for: its rotary angles grow beyond them."""
    return min(cfg.max_position_embeddings, cfg.size("max_trained_positions"))


def _attend(b: Builder, cfg: ModelConfig, x: Value, p: Names) -> Value:
    hidden, heads, bias = cfg.hidden_size, (cfg.num_attention_heads, cfg.head_dim), cfg.flag("qkv_proj_bias")
    packed = b.linear(x, p / "Wqkv", 3 * hidden, bias=bias)
    q, k, v = (b.slice(packed, n * hidden, heads) for n in range(3))
    rope = cfg.rope(base="rotary_emb_base")
    return b.linear(
        attend_both(b, b.rotary(q, rope), b.rotary(k, rope), v), p / "out_proj", hidden, bias=bias
    )


def _gated_mlp(b: Builder, cfg: ModelConfig, x: Value, p: Names) -> Value:
    if (gate := _GATES.get(cfg.hidden_act)) is None:
        problem = f"activation_function = {quoted(cfg.hidden_act)} is not supported"
        raise ConfigError(f"config.json: {problem}", f"known are {', '.join(_GATES)}")
    up, gated = (
        b.linear(x, p / name, cfg.intermediate_size, bias=cfg.flag("mlp_fc1_bias"))
        for name in ("fc11", "fc12")
    )
    h = b.gated_activation(gated, up, gate)
    return b.linear(h, p / "fc2", cfg.hidden_size, bias=cfg.flag("mlp_fc2_bias"))
