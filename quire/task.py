"""The task of a model: to continue texts, or to give embeddings or scores of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.models.encoders import CROSS_ENCODERS, ENCODERS, fields_of, read_encoder
from quire.models.model import Model
from quire.models.pooling import pooled_decoder
from quire.models.purpose import Pooling
from quire.program.ops import RowAttention
from quire.text.tokenizer import Tokenizer, find_tokenizer
from quire.weights.sentence import SentenceSettings
from quire.weights.source import ModelSource

ReadDecoder = Callable[[Mapping[str, Any]], Model]
_DECODER, _BARE, _SCORER = "ForCausalLM", "Model", "ForSequenceClassification"
_BARE_TEXT = "TextModel"  # of families whose other models read images too
# The tokens of a decoder that answers whether a document meets a query, unless config.json names others
_ANSWERS = ("no", "yes")
_HEAD = "score"  # a matrix of the rows for these alone, which id2label names then
# Fields of config.json that say how scores are made; the last is vLLM's and always so here.
_OF_SCORES = (
    "classifier_from_token",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
    "is_original_qwen3_reranker",
)


def read_for(source: ModelSource, task: str, read: ReadDecoder, decoders: Collection[str]) -> Model:
    """Read a model for a task: "generate", "embed" or "score", or with "auto" the one that it was made for.

    `read` reads the config.json of a decoder; `decoders` are the architectures that it knows. Raises
    ConfigError for a model that cannot be used so.
    """
    raw = source.config()
    name = _architecture(raw)
    rows = _rows_of_head(raw)
    if task == "auto" and (name in CROSS_ENCODERS or rows or raw.get("classifier_from_token") is not None):
        task = "score"
    # Files of a model for scores may list other modules.
    settings = source.sentence_settings() if task in ("auto", "embed") else None
    if task == "auto":
        bare = name.endswith(_BARE) and name not in decoders
        known = name in ENCODERS or settings is not None or _as_decoder(name, decoders) != name
        task = "embed" if bare or known else "generate"
    if name in CROSS_ENCODERS or name in ENCODERS:
        return _encoder(name, raw, task, settings, source)
    if task == "generate":
        return _generating(read(raw))
    if name.endswith(_BARE) and name not in decoders and _as_decoder(name, decoders) == name:
        hint = f"known are {', '.join(ENCODERS)}, and decoders"
        raise ConfigError(f"unknown architecture {quoted(name)} of a model for embeddings", hint)
    decoder = {**raw, "architectures": [_as_decoder(name, decoders)]}
    pooling = _embedding(settings) if settings else Pooling("embed", "last", normalized=True)
    if task == "score" and rows:
        pooling = Pooling("score", answers=rows, head=_HEAD)
    elif task == "score":
        pooling = Pooling("score", answers=_answers(raw, find_tokenizer(source)))
    model = read(decoder)
    longest = model.config.max_position_embeddings
    if settings is not None and settings.max_tokens is not None:
        longest = min(longest, settings.max_tokens)
    return replace(
        model,
        architecture=name,
        program=pooled_decoder(model.program, pooling),
        pooling=pooling,
        longest=longest,
    )


def check_fields(
    model: Model,
    raw: Mapping[str, Any],
    overrides: Iterable[str],
    check: Callable[[Mapping[str, Any], Iterable[str]], None],
    decoders: Collection[str],
) -> None:
    """Raise ConfigError for a field of `hf_overrides` that the model does not read.

    `check` does that for a decoder; `decoders` are the architectures that it knows.
    """
    left = [name for name in overrides if model.pooling is None or name not in _OF_SCORES]
    if model.architecture not in ENCODERS and model.architecture not in CROSS_ENCODERS:
        own = {} if model.pooling is None else {"architectures": [_as_decoder(model.architecture, decoders)]}
        check({**raw, **own}, left)
        return
    for name in left:
        if name not in (known := fields_of(model.architecture)):
            hint = f"fields of this family: {', '.join(sorted(known))}"
            raise ConfigError(f"hf_overrides: the model reads no field {quoted(name)}", hint)


def _embedding(settings: SentenceSettings) -> Pooling:
    return Pooling("embed", settings.method, settings.normalized, settings.dense)


def _generating(model: Model) -> Model:
    """Return a model that generates text. Raises ConfigError for one whose tokens see those after them."""
    if any(isinstance(op, RowAttention) for op in model.program):
        problem = "config.json: the tokens of this model see those after them, so it generates no text"
        raise ConfigError(problem, "start it with task = 'embed'")
    return model


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    return name if isinstance(name, str) else ""


def _as_decoder(name: str, decoders: Collection[str]) -> str:
    """Return the architecture with a head whose layers are those of a bare or a classifying one."""
    for end in (_BARE_TEXT, _BARE, _SCORER):
        if name.endswith(end) and (whole := name.removesuffix(end) + _DECODER) in decoders:
            return whole
    return name


def _encoder(
    name: str, raw: Mapping[str, Any], task: str, settings: SentenceSettings | None, source: ModelSource
) -> Model:
    own = "score" if name in CROSS_ENCODERS else "embed"
    if task != own:
        what = "scores of pairs of texts" if own == "score" else "embeddings"
        raise ConfigError(f"{name} gives {what}, so it cannot be used for task = {task!r}", "leave task out")
    if own == "embed":
        model = read_encoder(name, raw, _embedding(settings) if settings else Pooling("embed", "mean"))
    else:
        _check_one_label(raw)
        tokenizer = find_tokenizer(source)
        found = tokenizer.token_id(tokenizer.special_tokens.get("sep_token")) if tokenizer else None
        separator = -1 if found is None else found
        pooling = Pooling("score", separator=separator, sigmoid=_has_sigmoid(raw))
        model = read_encoder(name, raw, pooling)
    if settings is not None and settings.max_tokens is not None:
        longest = min(settings.max_tokens, model.longest or settings.max_tokens)
        model = replace(model, longest=longest)
    return model


def _check_one_label(raw: Mapping[str, Any]) -> None:
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if count != 1:
        problem = f"the model has {quoted(count)} labels, and a score is that of one"
        raise ConfigError(
            f"config.json: {problem}", "take a cross-encoder with one label, such as a reranker"
        )


def _has_sigmoid(raw: Mapping[str, Any]) -> bool:
    """Return True unless config.json says that scores are used as they are (sentence-transformers)."""
    own = raw.get("sentence_transformers")
    stated = own.get("activation_fn") if isinstance(own, dict) else None
    stated = stated or raw.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(stated).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ConfigError(f"config.json: the activation {quoted(stated)} is not supported")
    return kind == "Sigmoid"


def _rows_of_head(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows of the answers in a matrix of their own, None for a decoder that has none."""
    labels = raw.get("id2label")
    if not isinstance(labels, dict) or raw.get("classifier_from_token") is not None:
        return None
    named = [labels.get(str(number)) for number in range(len(labels))]
    if not _architecture(raw).endswith(_SCORER) or named not in ([*_ANSWERS], [*reversed(_ANSWERS)]):
        return None
    no, yes = (named.index(answer) for answer in _ANSWERS)
    return no, yes


def _answers(raw: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, int]:
    """Return the ids of the two tokens whose logits a score compares."""
    stated = raw.get("classifier_from_token")
    names = list(_ANSWERS) if stated is None else stated
    if not isinstance(names, list) or len(names) != 2:
        raise ConfigError(f"config.json: classifier_from_token = {quoted(names)} are not two tokens")
    ids = []
    for token in names:
        number = token
        if isinstance(token, str):
            number = tokenizer.token_id(token) if tokenizer else None
        if type(number) is not int or number < 0:
            raise ConfigError(f"the model has no token {quoted(token)}, so it cannot give scores")
        ids.append(number)
    return ids[0], ids[1]
