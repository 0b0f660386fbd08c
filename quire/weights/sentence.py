"""Settings of sentence-transformers: modules of a model, the length of texts, prompts in front of them.

The files are modules.json, which lists the modules, a config.json in the folder of each, and
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

SETTINGS = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
MODULE_SETTINGS = ("*_Pooling/config.json",)
_LIMIT_BYTES = 1 << 20
_PREFIX = "pooling_mode_"
_METHODS: dict[str, Literal["mean", "cls", "last"]] = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """The settings of a model for embeddings: `prompts` are beginnings of texts, by the names of tasks."""

    method: Literal["mean", "cls", "last"]
    normalized: bool
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_settings(folder: Path) -> SentenceSettings | None:
    """Read the settings of a model's folder; None if it has no modules.json.

    Raises ConfigError for files that are invalid, and for modules that are not supported.
    """
    path = folder / "modules.json"
    if not present(path):
        return None
    first, *others = _modules(path)
    if first[0] != "Transformer" or first[1]:
        raise ConfigError(f"{path}: the first module is not a Transformer in the folder itself")
    kinds = [kind for kind, _ in others]
    if kinds not in (["Pooling"], ["Pooling", "Normalize"]):
        problem = f"the modules {', '.join(kinds) or 'after the first'} are not supported"
        raise ConfigError(f"{path}: {problem}", "supported are Pooling, and Normalize after it")
    method = _method(folder / others[0][1] / "config.json")
    sizes = _optional(folder / "sentence_bert_config.json")
    stated = _optional(folder / "config_sentence_transformers.json")
    prompts, default = _prompts(stated)
    length = sizes.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"sentence_bert_config.json: max_seq_length = {quoted(length)} is not a size")
    return SentenceSettings(method, len(kinds) == 2, length, prompts, default)


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
