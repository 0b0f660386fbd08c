"""Encoders: BERT (arXiv:1810.04805), RoBERTa (1907.11692) with XLM-R (1911.02116) and CamemBERT (1911.03894),
DistilBERT (1910.01108), MPNet (2004.09297), ModernBERT (2412.13663), and NomicBERT and GTE of other files.

Their attention goes both ways, so a text is computed whole. They give its embedding, or with a head the score
of a pair of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import ConfigError, quoted
from quire.models import gte, nomic_bert
from quire.models.config import FULL, SLIDING, ModelConfig, read_config, read_fields
from quire.models.model import Model
from quire.models.pooling import attend_both, embed_segments, ended, pool
from quire.models.purpose import Pooling
from quire.program import Builder, Names, Rows, Value, WeightSpec, ops
from quire.program.ops.attention import Distances
from quire.program.rope import Rope

Record = Callable[[Builder, ModelConfig], Value]  # of the hidden states [T, hidden]
Head = Callable[[Builder, ModelConfig, Value], Value]  # of [T, hidden], giving scores [L, 1]
_W = Names("")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A family of encoders: how its layers and the head of its cross-encoders are recorded.

    `defaults`, `spelled` and `only` are as in Family; `unused` are patterns of tensors that no part needs.
    `longest` returns the number of positions that can be used.
    """

    record: Callable[[Builder, ModelConfig, Pooling], Value]
    head: Head
    defaults: Mapping[str, Any]
    spelled: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    longest: Callable[[ModelConfig], int] = lambda cfg: cfg.max_position_embeddings


class _Names(NamedTuple):
    """The names of the matrices and norms of a layer."""

    query: str
    key: str
    value: str
    attended: str
    attention_norm: str
    wide: str = "intermediate.dense"
    narrow: str = "output.dense"
    norm: str = "output.LayerNorm"


_OF_BERT = _Names(
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    "attention.output.LayerNorm",
)
_OF_DISTILBERT = _Names(
    *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
    *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
_FIRST_OF_MPNET = 2  # the first token's position: that of padding is 1, whatever its id is
_OF_MPNET = _Names(
    *("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm")
)


def bert(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    positions = b.position_embed(
        _W / "embeddings.position_embeddings", cfg.max_position_embeddings, cfg.hidden_size
    )
    return _bert_layers(b, cfg, positions, pooling)


def roberta(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    """Record BERT's layers with positions that begin after that of padding; both texts are one segment."""
    positions = _positions_after(b, cfg, _after_padding(cfg))
    return _bert_layers(b, cfg, positions, replace(pooling, separator=-1))


def distilbert(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    """Record BERT's layers without segments."""
    positions = b.position_embed(
        _W / "embeddings.position_embeddings", cfg.max_position_embeddings, cfg.hidden_size
    )
    x = _embedded(b, cfg, positions)
    for i in range(cfg.num_hidden_layers):
        x = _post_norm_layer(b, cfg, x, _W / f"transformer.layer.{i}", _OF_DISTILBERT)
    return x


def mpnet(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    """Record BERT's layers without segments; scores also depend on the distance, in all layers alike."""
    x = _embedded(b, cfg, _positions_after(b, cfg, _FIRST_OF_MPNET))
    name, buckets = "encoder.relative_attention_bias.weight", cfg.size("relative_attention_num_buckets")
    table = WeightSpec(name, (buckets, cfg.num_attention_heads), (name,))
    biases = Distances(table, cfg.max_position_embeddings - _FIRST_OF_MPNET)
    for i in range(cfg.num_hidden_layers):
        x = _post_norm_layer(b, cfg, x, _W / f"encoder.layer.{i}", _OF_MPNET, biases)
    return x


def _positions_after(b: Builder, cfg: ModelConfig, first: int) -> Value:
    """Embed positions by the rows of a table from `first` on."""
    name, count = "embeddings.position_embeddings", cfg.max_position_embeddings - first
    if count < 1:
        raise ConfigError(f"config.json: max_position_embeddings = {cfg.max_position_embeddings} is too few")
    rows = Rows(cfg.max_position_embeddings, ((first, count),))
    table = WeightSpec(f"{name}.of_tokens.weight", (count, cfg.hidden_size), (f"{name}.weight",), rows=rows)
    return b.record(ops.PositionEmbed(b.value((cfg.hidden_size,)), table)).out


def _after_padding(cfg: ModelConfig) -> int:
    padding = cfg.get("pad_token_id")
    first = 1 + padding if type(padding) is int else -1
    if not 0 < first < cfg.max_position_embeddings:
        raise ConfigError(f"config.json: pad_token_id = {quoted(padding)} is not the id of a token")
    return first


def _bert_layers(b: Builder, cfg: ModelConfig, positions: Value, pooling: Pooling) -> Value:
    hidden, w = cfg.hidden_size, _W / "embeddings"
    x = b.add(b.embed(w / "word_embeddings", cfg.vocab_size, hidden), positions)
    types = embed_segments(
        b, w / "token_type_embeddings", cfg.size("type_vocab_size"), hidden, pooling.separator
    )
    x = b.layer_norm(b.add(x, types), w / "LayerNorm", cfg.norm_eps)
    for i in range(cfg.num_hidden_layers):
        x = _post_norm_layer(b, cfg, x, _W / f"encoder.layer.{i}", _OF_BERT)
    return x


def _embedded(b: Builder, cfg: ModelConfig, positions: Value) -> Value:
    """Return the normalized embeddings of tokens at positions."""
    w = _W / "embeddings"
    x = b.add(b.embed(w / "word_embeddings", cfg.vocab_size, cfg.hidden_size), positions)
    return b.layer_norm(x, w / "LayerNorm", cfg.norm_eps)


def _post_norm_layer(
    b: Builder, cfg: ModelConfig, x: Value, p: Names, names: _Names, biases: Distances | None = None
) -> Value:
    hidden, heads = cfg.hidden_size, (cfg.num_attention_heads, cfg.head_dim)
    q, k, v = (b.linear(x, p / name, heads, bias=True) for name in (names.query, names.key, names.value))
    h = b.linear(attend_both(b, q, k, v, biases=biases), p / names.attended, hidden, bias=True)
    x = b.layer_norm(b.add(h, x), p / names.attention_norm, cfg.norm_eps)
    h = b.linear(x, p / names.wide, cfg.intermediate_size, bias=True)
    h = b.linear(b.activation(h, cfg.hidden_act), p / names.narrow, hidden, bias=True)
    return b.layer_norm(b.add(h, x), p / names.norm, cfg.norm_eps)


def _bert_head(b: Builder, cfg: ModelConfig, x: Value) -> Value:
    h = b.linear(pool(b, x, "cls"), _W / "pooler.dense", cfg.hidden_size, bias=True)
    return b.linear(b.activation(h, "tanh"), _W / "classifier", 1, bias=True)


def _roberta_head(b: Builder, cfg: ModelConfig, x: Value) -> Value:
    h = b.linear(pool(b, x, "cls"), _W / "classifier.dense", cfg.hidden_size, bias=True)
    return b.linear(b.activation(h, "tanh"), _W / "classifier.out_proj", 1, bias=True)


def _distilbert_head(b: Builder, cfg: ModelConfig, x: Value) -> Value:
    h = b.linear(pool(b, x, "cls"), _W / "pre_classifier", cfg.hidden_size, bias=True)
    return b.linear(b.activation(h, "relu"), _W / "classifier", 1, bias=True)


def modernbert(b: Builder, cfg: ModelConfig, pooling: Pooling) -> Value:
    """Record pre-norm layers with rotary positions, most of which see only what is near."""
    hidden, bias, kinds = cfg.hidden_size, cfg.flag("norm_bias"), _modern_kinds(cfg)
    ropes = {kind: _modern_rope(cfg, kind) for kind in dict.fromkeys(kinds)}
    x = b.embed(_W / "embeddings.tok_embeddings", cfg.vocab_size, hidden)
    x = b.layer_norm(x, _W / "embeddings.norm", cfg.norm_eps, bias)
    for i, kind in enumerate(kinds):
        p = _W / f"layers.{i}"
        h = b.layer_norm(x, p / "attn_norm", cfg.norm_eps, bias) if i else x
        packed = b.linear(h, p / "attn.Wqkv", 3 * hidden, bias=cfg.flag("attention_bias"))
        heads = (cfg.num_attention_heads, cfg.head_dim)
        q, k, v = (b.slice(packed, n * hidden, heads) for n in range(3))
        q, k = b.rotary(q, ropes[kind]), b.rotary(k, ropes[kind])
        h = attend_both(b, q, k, v, cfg.size("local_attention") // 2 if kind == SLIDING else None)
        x = b.add(x, b.linear(h, p / "attn.Wo", hidden, bias=cfg.flag("attention_bias")))
        h = b.layer_norm(x, p / "mlp_norm", cfg.norm_eps, bias)
        packed = b.linear(h, p / "mlp.Wi", 2 * cfg.intermediate_size, bias=cfg.flag("mlp_bias"))
        gate, up = (b.slice(packed, n * cfg.intermediate_size, cfg.intermediate_size) for n in range(2))
        h = b.gated_activation(gate, up, cfg.hidden_act)
        x = b.add(x, b.linear(h, p / "mlp.Wo", hidden, bias=cfg.flag("mlp_bias")))
    return b.layer_norm(x, _W / "final_norm", cfg.norm_eps, bias)


def _modern_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the kinds of the layers: as listed, or every n-th sees all of the text."""
    listed = cfg.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != cfg.num_hidden_layers:
            raise ConfigError("config.json: layer_types does not list all layers")
        if any(kind not in (FULL, SLIDING) for kind in listed):
            raise ConfigError(f"config.json: layer_types = {quoted(listed)}", f"known are {FULL}, {SLIDING}")
        return tuple(listed)
    every = cfg.size("global_attn_every_n_layers")
    return tuple(SLIDING if i % every else FULL for i in range(cfg.num_hidden_layers))


def _modern_rope(cfg: ModelConfig, kind: str) -> Rope:
    """Return the rotary embedding of a kind of layer, from rope_parameters or the older fields."""
    given = [cfg.get("rope_parameters") or {}, cfg.get("rope_scaling") or {}]  # the second is of all kinds
    if isinstance(given[0], Mapping):
        given[0] = given[0].get(kind) or {}
    for stated in given:
        if not isinstance(stated, Mapping):
            raise ConfigError(f"config.json: rope parameters of {kind} = {quoted(stated)} are not an object")
    base = "global_rope_theta" if kind == FULL else "local_rope_theta"
    return cfg.rope({**given[0], **given[1]}, base=base)


def _modern_head(b: Builder, cfg: ModelConfig, x: Value) -> Value:
    method = cfg.get("classifier_pooling")
    if method not in ("cls", "mean"):
        raise ConfigError(f"config.json: classifier_pooling = {quoted(method)}", "known are cls and mean")
    act = cfg.get("classifier_activation")
    h = b.linear(pool(b, x, method), _W / "head.dense", cfg.hidden_size, bias=cfg.flag("classifier_bias"))
    h = b.layer_norm(b.activation(h, str(act)), _W / "head.norm", cfg.norm_eps, cfg.flag("norm_bias"))
    return b.linear(h, _W / "classifier", 1, bias=True)


_SIZES = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "eos_token_id": None}
_BERT = {
    **_SIZES,
    "vocab_size": 30522,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "rms_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "vocab_size": 50265, "pad_token_id": 1}
_CAMEMBERT = {**_ROBERTA, "vocab_size": 30522}
_DISTILBERT = {key: value for key, value in _BERT.items() if key not in ("type_vocab_size", "pad_token_id")}
_DISTILBERT["num_hidden_layers"] = 6
_MPNET = {**_DISTILBERT, "num_hidden_layers": 12, "vocab_size": 30527, "relative_attention_num_buckets": 32}
_MODERN = {
    **_SIZES,
    "num_hidden_layers": 22,
    "vocab_size": 50368,
    "intermediate_size": 1152,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "layer_types": None,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
    "classifier_bias": False,
}
_EPS = {"rms_norm_eps": "layer_norm_eps"}
_DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_MODERN_NAMES = {"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"}
_PLAIN = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
_BUFFERS = ("embeddings.position_ids",)
_UNUSED = (*_BUFFERS, "cls.*", "lm_head.*", "pooler.*")
_bert = Encoder(bert, _bert_head, _BERT, _EPS, _PLAIN, _UNUSED)
_roberta = Encoder(
    *(roberta, _roberta_head, _ROBERTA, _EPS, _PLAIN, _UNUSED),
    longest=lambda cfg: cfg.max_position_embeddings - _after_padding(cfg),
)
_camembert = replace(_roberta, defaults=_CAMEMBERT)
_distilbert = Encoder(distilbert, _distilbert_head, _DISTILBERT, _DISTILBERT_NAMES, unused=("vocab_*",))
_mpnet = Encoder(
    *(mpnet, _roberta_head, _MPNET, _EPS),
    only={"relative_attention_num_buckets": (32,)},
    unused=_UNUSED,
    longest=lambda cfg: cfg.max_position_embeddings - _FIRST_OF_MPNET,
)
_modern = Encoder(modernbert, _modern_head, _MODERN, _MODERN_NAMES, unused=("head.*", "decoder.*"))
_nomic = Encoder(
    *(nomic_bert.nomic_bert, _bert_head, nomic_bert.DEFAULTS, nomic_bert.SPELLED, nomic_bert.ONLY),
    unused=("cls.*", "pooler.*"),
    longest=nomic_bert.longest,
)
_gte = Encoder(gte.gte, _bert_head, gte.DEFAULTS, _EPS, gte.ONLY, ("lm_head.*", "pooler.*"))
ENCODERS: dict[str, Encoder] = {
    "BertModel": _bert,
    "BertForMaskedLM": _bert,
    "BertForPreTraining": _bert,
    "RobertaModel": _roberta,
    "RobertaForMaskedLM": _roberta,
    "XLMRobertaModel": _roberta,
    "XLMRobertaForMaskedLM": _roberta,
    "CamembertModel": _camembert,
    "CamembertForMaskedLM": _camembert,
    "DistilBertModel": _distilbert,
    "DistilBertForMaskedLM": _distilbert,
    "MPNetModel": _mpnet,
    "MPNetForMaskedLM": _mpnet,
    "NomicBertModel": _nomic,
    "NewModel": _gte,
    "NewForMaskedLM": _gte,
    "GteModel": _gte,
    "ModernBertModel": _modern,
    "ModernBertForMaskedLM": _modern,
}
CROSS_ENCODERS: dict[str, Encoder] = {
    "BertForSequenceClassification": _bert,
    "RobertaForSequenceClassification": _roberta,
    "XLMRobertaForSequenceClassification": _roberta,
    "CamembertForSequenceClassification": _camembert,
    "DistilBertForSequenceClassification": _distilbert,
    "MPNetForSequenceClassification": _mpnet,
    "NewForSequenceClassification": _gte,
    "ModernBertForSequenceClassification": _modern,
}


def read_encoder(name: str, raw: Mapping[str, Any], pooling: Pooling) -> Model:
    """Record the program of an encoder. Raises ConfigError for what config.json has that is not supported."""
    encoder = CROSS_ENCODERS[name] if pooling.task == "score" else ENCODERS[name]
    for key, done in encoder.only.items():
        if key in raw and raw[key] not in done:
            raise ConfigError(f"config.json: {key} = {quoted(raw[key])} is not supported")
    fields = read_fields(raw, encoder.defaults, encoder.spelled, {})
    cfg = read_config(fields, lambda fields, layer: False, (FULL, SLIDING))
    b = Builder()
    x = encoder.record(b, cfg, pooling)
    output = encoder.head(b, cfg, x) if pooling.task == "score" else pool(b, x, pooling.method)
    program = ended(b.program(output, encoder.unused), pooling)
    return Model(name, cfg, program, pooling, encoder.longest(cfg))


def fields_of(name: str) -> set[str]:
    """Return the fields of config.json that an encoder's family reads."""
    encoder = ENCODERS.get(name) or CROSS_ENCODERS[name]
    known = {encoder.spelled.get(field, field) for field in encoder.defaults} | encoder.defaults.keys()
    return known | encoder.only.keys() | {"architectures", "id2label", "num_labels"}
