"""Settings of sentence-transformers: modules of a model, the length of texts, prompts in front of them.

The files are modules.json, which lists the modules, a config.json in the folder of each that has one, and
sentence_bert_config.json and config_sentence_transformers.json, named after the classes of that library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.errors import ConfigError, quoted
from quire.json_file import read_json
from quire.regular_file import present, read_limited
from quire.types import DenseModule

SETTINGS = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
MODULE_SETTINGS = ("*_Pooling/config.json", "*_Dense/config.json")
MODULE_WEIGHTS = "*_Dense/model.safetensors"
_LIMIT_BYTES = 1 << 20
_PREFIX = "pooling_mode_"
_METHODS: dict[str, Literal["mean", "cls", "last"]] = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
_ACTIVATIONS = {  # of dense modules: the names of their classes in torch
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_OF_DENSE = {  # what it may say besides
    "module_input_name": (None, "sentence_embedding"),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (None, False),
}
_MAX_FEATURES = 1 << 20


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """The settings of a model for embeddings: `prompts` are beginnings of texts, by the names of tasks.

    With `lower_case` texts are read in small letters, whatever the tokenizer does. The vector that pooling by
    `method` gives goes through the modules `dense`.
    """

    method: Literal["mean", "cls", "last"]
    normalized: bool
    dense: tuple[DenseModule, ...] = ()
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False


def read_settings(folder: Path) -> SentenceSettings | None:
    """Read the settings of a model's folder; None if it has no modules.json.

    Raises ConfigError for files that are invalid, and for modules that are not supported.
    """
    path = folder / "modules.json"
    if not present(path):
        return None
    first, pooling, *others = _modules(path)
    if first[0] != "Transformer" or first[1]:
        raise ConfigError(f"{path}: the first module is not a Transformer in the folder itself")
    normalized = others[-1:] != [] and others[-1][0] == "Normalize"
    layers = others[:-1] if normalized else others
    if pooling[0] != "Pooling" or any(kind != "Dense" for kind, _ in layers):
        problem = f"the modules {', '.join(kind for kind, _ in (pooling, *others))} are not supported"
        hint = "supported are Pooling, Dense modules after it, and Normalize at the end"
        raise ConfigError(f"{path}: {problem}", hint)
    method = _method(folder / pooling[1] / "config.json")
    dense = tuple(_dense(folder / where / "config.json", where) for _, where in layers)
    sizes = _optional(folder / "sentence_bert_config.json")
    stated = _optional(folder / "config_sentence_transformers.json")
    prompts, default = _prompts(stated)
    length = sizes.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"sentence_bert_config.json: max_seq_length = {quoted(length)} is not a size")
    lower_case = sizes.get("do_lower_case") is True
    return SentenceSettings(method, normalized, dense, length, prompts, default, lower_case)


def module_files(folder: Path) -> list[str]:
    """Return the files that modules of a model's folder may have, in folders of their own."""
    listed = _modules(folder / "modules.json") if present(folder / "modules.json") else []
    names = ("config.json", "model.safetensors")
    return [f"{where}/{name}" for _, where in listed if where for name in names]


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class of each module, and its folder."""
    text = read_limited(path, _LIMIT_BYTES)
    try:
        listed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(listed, list) or not 1 < len(listed) <= 16:
        raise ConfigError(f"{path}: not a list of modules, at least two")
    found = []
    for module in listed:
        kind = module.get("type") if isinstance(module, dict) else None
        where = module.get("path", "") if isinstance(module, dict) else None
        if not isinstance(kind, str) or not isinstance(where, str):
            raise ConfigError(f"{path}: {quoted(module)} is not a module with a type and a path")
        if "/" in where or "\\" in where or where in (".", ".."):
            raise ConfigError(f"{path}: {quoted(where)} is not a folder beside this file")
        found.append((kind.rpartition(".")[2], where))
    return found


def _method(path: Path) -> Literal["mean", "cls", "last"]:
    """Return the pooling method: pooling_mode as older or newer versions write it."""
    config = read_json(path, _LIMIT_BYTES)
    stated = config.get("pooling_mode")
    if stated is not None:
        chosen = stated if isinstance(stated, list) else [stated]
    else:
        chosen = [
            name.removeprefix(_PREFIX) for name, on in config.items() if name.startswith(_PREFIX) and on
        ]
    if len(chosen) != 1 or chosen[0] not in _METHODS:
        problem = f"pooling {quoted(chosen)} is not supported"
        raise ConfigError(f"{path}: {problem}", "supported are mean_tokens, cls_token and lasttoken")
    if config.get("include_prompt") is False:
        raise ConfigError(f"{path}: pooling without the prompt is not supported")
    return _METHODS[chosen[0]]


def _dense(path: Path, folder: str) -> DenseModule:
    """Read the config.json of a dense module."""
    if not folder:
        raise ConfigError(f"{path}: a Dense module without a folder of its own")
    config = read_json(path, _LIMIT_BYTES)
    width, size = (_features(path, config, key) for key in ("in_features", "out_features"))
    bias = config.get("bias", True)
    if not isinstance(bias, bool):
        raise ConfigError(f"{path}: bias = {quoted(bias)} is not a boolean")
    stated = config.get("activation_function", "Tanh")
    activation = str(stated).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        problem = f"the activation {quoted(stated)} is not supported"
        raise ConfigError(f"{path}: {problem}", f"supported are {', '.join(_ACTIVATIONS)}")
    for key, done in _OF_DENSE.items():
        if config.get(key) not in done:
            raise ConfigError(f"{path}: {key} = {quoted(config[key])} is not supported")
    return DenseModule(folder, width, size, bias, _ACTIVATIONS[activation])


def _features(path: Path, config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    if type(size) is not int or not 0 < size <= _MAX_FEATURES:
        raise ConfigError(f"{path}: {key} = {quoted(size)} is not a size")
    return size


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, _LIMIT_BYTES) if present(path) else {}


def _prompts(stated: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that a text has if none is named."""
    where = "config_sentence_transformers.json"
    prompts, default = stated.get("prompts") or {}, stated.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{where}: prompts = {quoted(prompts)} are not texts by name")
    if default is not None and default not in prompts:
        raise ConfigError(f"{where}: default_prompt_name = {quoted(default)} names no prompt")
    return prompts, default
