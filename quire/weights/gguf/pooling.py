"""The vectors or scores that a model in a GGUF file gives in place of text, by its metadata."""

from __future__ import annotations

from typing import Any, Literal

from quire.errors import ConfigError, quoted
from quire.types import DenseModule
from quire.weights.gguf.architectures import Architecture
from quire.weights.gguf.keys import Keys
from quire.weights.gguf.tables import DENSE
from quire.weights.sentence import SentenceSettings

_KEY = "pooling_type"
_NONE, _RANK = 0, 4
_METHODS: dict[int, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
_HEAD = "cls.output.weight"
_ANSWERS, _SCORER = {"yes", "no"}, "ForSequenceClassification"


def settings_of(keys: Keys, architecture: Architecture) -> SentenceSettings | None:
    """Return how the model makes embeddings of texts, None if the file does not say that it does.

    They are scaled to length 1, as llama.cpp's server has them. Raises ConfigError for an unknown method.
    """
    method = _method(keys)
    if method == _NONE and not architecture.encoder:
        return None
    if method == _NONE:
        problem = f"{keys.prefix}.{_KEY} = 0: a vector for each token is not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}")
    if method is None or ranks(keys):
        return None
    return SentenceSettings(_METHODS[method], normalized=True, dense=_dense(keys))


def _dense(keys: Keys) -> tuple[DenseModule, ...]:
    """Return the modules after pooling, none of which has an activation (EmbeddingGemma's)."""
    found = []
    for name in DENSE:
        if (table := keys.tensors.get(f"{name}.weight")) is not None:
            if len(table.shape) != 2:
                raise ConfigError(f"{keys.metadata.where}: tensor {name}.weight is not a matrix")
            size, width = table.shape
            found.append(DenseModule(name, width, size, f"{name}.bias" in keys.tensors, None))
    return tuple(found)


def ranks(keys: Keys) -> bool:
    """Return True for a model that gives scores of pairs of texts. Some files say so by its head alone."""
    method = _method(keys)
    return method == _RANK or (method is None and _HEAD in keys.tensors)


def scoring(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of config.json of a model that gives scores; {} for another.

    The head of a decoder is the two rows of the output matrix for the tokens "yes" and "no", that of an
    encoder a layer and its output. Raises ConfigError for other labels, and for a file that lacks the head.
    """
    if not ranks(keys):
        return {}
    for name in ("cls.weight", _HEAD) if architecture.encoder else (_HEAD,):
        if name not in keys.tensors:
            problem = f"the model gives scores, but a part of its head, {name}, was left out of the file"
            raise ConfigError(
                f"{keys.metadata.where}: {problem}", "take the safetensors version of the model"
            )
    if architecture.encoder:
        name = architecture.name.removesuffix("Model")
        return {"architectures": [f"{name}{_SCORER}"], "num_labels": keys.rows(_HEAD) or 1}
    labels = keys.metadata.texts(f"{keys.prefix}.classifier.output_labels")
    if len(labels) != len(_ANSWERS) or {*labels} != _ANSWERS:
        problem = f"scores by the labels {quoted(labels)} are not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}", 'supported are those by "yes" and "no"')
    name = architecture.name.removesuffix("ForCausalLM")
    return {
        "architectures": [f"{name}{_SCORER}"],
        "id2label": {str(i): text for i, text in enumerate(labels)},
    }


def _method(keys: Keys) -> int | None:
    value = keys.value(_KEY)
    if value is None or (type(value) is int and value in (_NONE, *_METHODS, _RANK)):
        return value
    problem = f"{keys.prefix}.{_KEY} = {quoted(value)} is not supported"
    raise ConfigError(f"{keys.metadata.where}: {problem}", "known are 0 to 4")
