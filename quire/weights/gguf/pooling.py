"""The vectors or scores that a model in a GGUF file gives in place of text, by its metadata."""

from __future__ import annotations

from typing import Any, Literal

from quire.errors import ConfigError, quoted
from quire.weights.gguf.keys import Keys
from quire.weights.sentence import SentenceSettings

_KEY = "pooling_type"
_NONE, _RANK = 0, 4
_METHODS: dict[int, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
_HEAD = "cls.output.weight"
_ANSWERS = {"yes", "no"}


def settings_of(keys: Keys) -> SentenceSettings | None:
    """Return how the model makes embeddings of texts, None if the file does not say that it does.

    They are scaled to length 1, as llama.cpp's server has them. Raises ConfigError for an unknown method.
    """
    method = _method(keys)
    if method == _NONE:
        problem = f"{keys.prefix}.{_KEY} = 0: a vector for each token is not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}")
    return None if method is None or ranks(keys) else SentenceSettings(_METHODS[method], normalized=True)


def ranks(keys: Keys) -> bool:
    """Return True for a model that gives scores of pairs of texts. Some files say so by its head alone."""
    method = _method(keys)
    return method == _RANK or (method is None and _HEAD in keys.tensors)


def labels_of(keys: Keys) -> list[str]:
    """Return the names of the outputs of the head that gives scores."""
    return keys.metadata.texts(f"{keys.prefix}.classifier.output_labels")


def scoring_decoder(keys: Keys, name: str) -> dict[str, Any]:
    """Return the fields of config.json of a decoder that gives scores; {} for another.

    Its head is the two rows of the output matrix for the tokens "yes" and "no". Raises ConfigError for any
    other, and for a file that lacks it.
    """
    if not ranks(keys):
        return {}
    if _HEAD not in keys.tensors:
        problem = f"the model gives scores, but its head, {_HEAD}, was left out when the file was made"
        raise ConfigError(f"{keys.metadata.where}: {problem}", "take a file made by llama.cpp's converter")
    labels = labels_of(keys)
    if len(labels) != len(_ANSWERS) or {*labels} != _ANSWERS:
        problem = f"scores by the labels {quoted(labels)} are not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}", 'supported are those by "yes" and "no"')
    return {
        "architectures": [name.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }


def _method(keys: Keys) -> int | None:
    value = keys.value(_KEY)
    if value is None or (type(value) is int and value in (_NONE, *_METHODS, _RANK)):
        return value
    problem = f"{keys.prefix}.{_KEY} = {quoted(value)} is not supported"
    raise ConfigError(f"{keys.metadata.where}: {problem}", "known are 0 to 4")
