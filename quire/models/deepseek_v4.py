"""DeepSeek-V4: hidden states in several streams, and attention to a window and to compressed entries.

All heads of a layer share one vector of each position, key and value in one. Entries compress so many tokens
each; of those of few tokens, an indexer chooses. Experts of the first layers are listed by token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.models.compressed import choose_entries, compress, compressed_attention
from quire.models.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    SLIDING,
    Fields,
    ModelConfig,
    rope_of_type,
)
from quire.models.defaults_latent import DEEPSEEK_V4
from quire.models.moe import expert_stack
from quire.models.streams import Streams
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops import GatedActivation, Rotary
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

CHOSEN, ALL = "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: SLIDING, 4: CHOSEN, 128: ALL}  # of compress_ratios
_RATES = {CHOSEN: 4, ALL: 128}  # by default
_OLDER = {CHOSEN: "csa", ALL: "hca"}  # ends of older names of the rates
_ROTATED = 64 / 512  # of each head, by default
_HASHED = 3  # layers whose experts are listed, by default
_KINDS = {"hash_moe": True, "moe": False}  # whether the experts of a layer are listed
_GATE_UP_DOWN = ("w1", "w3", "w2")
_MOST_STREAMS, _MOST_ROUNDS, _MOST_GROUPS = 64, 1000, 1 << 10  # far above any model
_MOST_TOKENS, _MOST_CHOSEN = 1 << 12, 1 << 16  # of an entry; heads of an indexer, and entries that it chooses


def deepseek_v4(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    if cfg.get("model_type") == "deepseek_ref" and cfg.hidden_size != DEEPSEEK_V4["hidden_size"]:
        problem = "DeepseekV4ForCausalLM with model_type 'deepseek_ref' does not state routed_scaling_factor"
        raise ConfigError(f"config.json: {problem}", "take the config.json of the model that it was made of")
    plain, compressed = _ropes(cfg)
    streams = Streams(
        b,
        cfg.size("hc_mult", _MOST_STREAMS),
        eps=cfg.norm_eps,
        floor=cfg.number("hc_eps", 0, 1),
        rounds=cfg.size("hc_sinkhorn_iters", _MOST_ROUNDS),
    )
    x = streams.begin(b.embed(w / "embed", cfg.vocab_size, cfg.hidden_size))
    for i, hashed in enumerate(_hashed(cfg)):
        p = w / f"layers.{i}"
        weights = streams.weights(x, p / "hc_attn_{}")
        h = b.rms_norm(streams.collapse(x, weights), p / "attn_norm", cfg.norm_eps)
        rope = plain if cfg.layer_types[i] == SLIDING else compressed
        x = streams.mix(x, _attention(b, cfg, h, p / "attn", rope, cfg.layer_types[i]), weights)
        weights = streams.weights(x, p / "hc_ffn_{}")
        h = b.rms_norm(streams.collapse(x, weights), p / "ffn_norm", cfg.norm_eps)
        x = streams.mix(x, _mixture(b, cfg, h, p / "ffn", hashed), weights)
    x = b.sampled_rows(x)
    h = streams.collapse(x, streams.weights(x, w / "hc_head_{}", reading=True))
    return b.linear(b.rms_norm(h, w / "norm", cfg.norm_eps), w / "head", cfg.vocab_size)


def layers_of(fields: Fields) -> tuple[str, ...]:
    """Return the type of attention of each layer, as listed, or by the ratios of compression."""
    layers, listed = fields.size("num_hidden_layers", MAX_LAYERS), fields.get("layer_types")
    if listed is None and fields.get("compress_ratios") is not None:
        listed = [_BY_RATIO.get(ratio) for ratio in fields.integers("compress_ratios")]
    if listed is None:
        return tuple(ALL if i < 2 or i % 2 == 0 else CHOSEN for i in range(layers))
    known = (SLIDING, CHOSEN, ALL)
    if not isinstance(listed, list) or len(listed) < layers or any(kind not in known for kind in listed):
        problem = f"layer_types, or compress_ratios, do not give {layers} layers one type each"
        raise ConfigError(f"config.json: {problem}", f"known are {', '.join(known)}, and ratios 0, 4 and 128")
    return tuple(listed[:layers])


def _hashed(cfg: ModelConfig) -> tuple[bool, ...]:
    """Return which layers have experts that are listed by token id."""
    layers, listed = cfg.num_hidden_layers, cfg.get("mlp_layer_types")
    if listed is None:
        stated = cfg.get("num_hash_layers") is not None
        first = cfg.number("num_hash_layers", 0, MAX_LAYERS) if stated else _HASHED
        return tuple(i < first for i in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or any(kind not in _KINDS for kind in listed):
        problem = f"mlp_layer_types = {quoted(listed)} does not say hash_moe or moe of each layer"
        raise ConfigError(f"config.json: {problem}")
    return tuple(_KINDS[kind] for kind in listed[:layers])


def _ropes(cfg: ModelConfig) -> tuple[Rope, Rope]:
    """Return the rotations of layers with a window alone, and of those with entries, which may be scaled."""
    given = cfg.rope_parameters()
    if "main" in given and "compress" in given:
        plain, compressed = (rope_of_type(given, name) for name in ("main", "compress"))
    else:
        plain, compressed = {}, {name: value for name, value in given.items() if name != "rope_theta"}
        if (given.get("rope_type") or given.get("type")) == "yarn":
            compressed.setdefault("attention_factor", 1.0)  # cosine and sine are as long as without it
    return _rope(cfg, plain, "rope_theta"), _rope(cfg, compressed, "compress_rope_theta")


def _rope(cfg: ModelConfig, given: Mapping[str, Any], base: str) -> Rope:
    """Return the rotation of the last numbers of a head, so many as are stated."""
    stated = Fields(given if given.get("partial_rotary_factor") is not None else cfg.values)
    part, turned = _ROTATED, cfg.optional_size("qk_rope_head_dim")
    if stated.get("partial_rotary_factor") is not None:
        part = stated.number("partial_rotary_factor", 0, 1)
    elif turned is not None:
        part = turned / cfg.head_dim
    dim = int(cfg.head_dim * part)
    if not 0 < dim <= cfg.head_dim or dim % 2:
        raise ConfigError(f"cannot rotate {dim} of {cfg.head_dim} numbers per head")
    return cfg.rope(given, base=base, interleaved=True, dim=dim)


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names, rope: Rope, kind: str) -> Value:
    """Return the output of attention to a window, and to entries that compress tokens."""
    heads, dim, groups = cfg.num_attention_heads, cfg.head_dim, cfg.size("o_groups", _MOST_GROUPS)
    if heads % groups or cfg.num_key_value_heads != 1:
        problem = f"{heads} heads cannot share {cfg.num_key_value_heads} keys and have {groups} groups"
        raise ConfigError(f"config.json: {problem}")
    latent = b.rms_norm(b.linear(h, p / "wq_a", cfg.size("q_lora_rank")), p / "q_norm", cfg.norm_eps)
    q = _rotated(b, b.rms_norm(b.linear(latent, p / "wq_b", (heads, dim)), None, cfg.norm_eps), rope)
    k = _rotated(b, b.rms_norm(b.linear(h, p / "wkv", (1, dim)), p / "kv_norm", cfg.norm_eps), rope)
    window, every, entries, chosen = cfg.size("sliding_window"), 0, None, None
    if kind != SLIDING:
        every = _rate(cfg, kind)
        entries = _entries(b, cfg, h, p / "compressor", rope, kind, dim)
    if kind == CHOSEN:
        chosen = _choice(b, cfg, h, latent, p / "indexer", rope)
    mixed = compressed_attention(
        b, q, k, entries, every, window=window, scale=dim**-0.5, sinks=p / "attn_sink", chosen=chosen
    )
    mixed = _rotated(b, mixed, rope, inverse=True)
    rank, width, name = cfg.size("o_lora_rank"), heads // groups * dim, p / "wo_a.weight"
    by_group = WeightSpec(name, (groups, rank, width), (name,), quantizable=True, by_head="outputs")
    narrow = b.linear_by_head(b.slice(mixed, 0, (groups, width)), by_group)
    return b.linear(narrow, p / "wo_b", cfg.hidden_size)


def _rate(cfg: ModelConfig, kind: str) -> int:
    """Return how many tokens an entry of a kind of layer compresses."""
    stated, older = cfg.get("compress_rates"), f"compress_rate_{_OLDER[kind]}"
    if cfg.get(older) is not None:
        return cfg.size(older, _MOST_TOKENS)
    if stated is not None and not isinstance(stated, Mapping):
        raise ConfigError(f"config.json: compress_rates = {quoted(stated)} is not an object")
    return Fields(_RATES if stated is None else stated).size(kind, _MOST_TOKENS)


def _entries(b: Builder, cfg: ModelConfig, h: Value, p: Names, rope: Rope, kind: str, dim: int) -> Value:
    """Return entries of so many tokens each, normalized, and rotated at the position of the first."""
    every, overlapping = _rate(cfg, kind), kind == CHOSEN
    values, gates = (b.linear(h, p / name, dim * (1 + overlapping)) for name in ("wkv", "wgate"))
    x = compress(b, values, gates, p / "ape", every, overlapping=overlapping)
    return _rotated(b, b.rms_norm(x, p / "norm", cfg.norm_eps), replace(rope, behind=every - 1))


def _choice(b: Builder, cfg: ModelConfig, h: Value, latent: Value, p: Names, rope: Rope) -> Value:
    """Return the entries that tokens attend to, chosen by entries of an indexer.

    The factors by which the model scales scores are left out, being positive: they change no choice.
    """
    heads, dim = cfg.size("index_n_heads", _MOST_CHOSEN), cfg.size("index_head_dim", MAX_HEAD_DIM)
    q = _rotated(b, b.linear(latent, p / "wq_b", (heads, dim)), rope)
    keys = _entries(b, cfg, h, p / "compressor", rope, CHOSEN, dim)
    factors, number = b.linear(h, p / "weights_proj", heads), cfg.size("index_topk", _MOST_CHOSEN)
    return choose_entries(b, q, factors, keys, _rate(cfg, CHOSEN), number)


def _rotated(b: Builder, x: Value, rope: Rope, inverse: bool = False) -> Value:
    """Rotate the last numbers of each head by position, or back."""
    if rope.dim > x.shape[-1]:
        raise ConfigError(f"cannot rotate {rope.dim} of {x.shape[-1]} numbers per head")
    return b.record(Rotary(b.value(x.shape, x.count), x, rope, x.shape[-1] - rope.dim, inverse)).out


def _mixture(b: Builder, cfg: ModelConfig, h: Value, p: Names, hashed: bool) -> Value:
    """Return the mixture of experts and the one that every token has."""
    inner, chosen = cfg.size("moe_intermediate_size"), cfg.size("num_experts_per_tok", MAX_EXPERTS)
    limit, experts = cfg.optional_positive("swiglu_limit"), cfg.num_experts
    bias, table = p / "gate.bias", p / "gate.tid2eid"
    shape = (cfg.vocab_size, chosen)
    listed = WeightSpec(table, (cfg.vocab_size * chosen,), (table,), stored=shape, below=experts)
    routing = Routing(
        chosen,
        "sqrtsoftplus",
        normalized=True,
        bias=None if hashed else WeightSpec(bias, (experts,), (bias,)),
        scaling=cfg.positive("routed_scaling_factor"),
        floor=1e-20,
        listed=listed if hashed else None,
    )
    stack = expert_stack(cfg, p / "experts", inner, _GATE_UP_DOWN)
    scores = b.linear(h, p / "gate", experts)
    mixed = b.experts(
        h, scores, stack, routing=routing, activation=cfg.hidden_act, limit=limit, shifted=False
    )
    own = p / "shared_experts"
    gate, up = (b.linear(h, own / name, inner) for name in _GATE_UP_DOWN[:2])
    open_up = b.record(GatedActivation(b.value(up.shape), gate, up, cfg.hidden_act, limit)).out
    return b.add(mixed, b.linear(open_up, own / _GATE_UP_DOWN[2], cfg.hidden_size))
