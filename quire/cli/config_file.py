"""`--config FILE`: flags of a command from a YAML file, under their long names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from quire.cli.option_types import MODELS, TEXT, OptionType, Repeated
from quire.config import EngineConfig
from quire.environment import user_path
from quire.errors import ConfigError, QuireError, did_you_mean, quoted
from quire.regular_file import read_limited

MAX_BYTES = 1 << 18
MAX_DEPTH = 4  # a mapping, the models in it, the flags of each, and lists
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}

# Of one model among several: where it is, how it is computed, and what its endpoints make of it.
OWN_FLAGS = {field.name for field in fields(EngineConfig)} | {
    *("served_model_name", "tool_call_parser", "reasoning_parser")
}

Check = Callable[[str, Any], None]  # raises a QuireError for a value out of range


@dataclass(frozen=True, slots=True)
class Setting:
    """A key and its value, with their location."""

    where: str  # "serve.yaml, line 3"
    key: str
    value: Any

    def error(self, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.where}: {problem}", hint)


def read_flags(
    path: str, flags: Mapping[str, argparse.Action], owners: Mapping[str, str], check: Check
) -> dict[str, Any]:
    """Return the values that a file gives to the flags of a command, by destination.

    `flags` are the command's by long name; `owners` names the commands that have a flag, for those that this
    one lacks. Raises ConfigError.
    """
    return _read(_settings(path), flags, owners, check)


def _read(
    settings: Iterable[Setting],
    flags: Mapping[str, argparse.Action],
    owners: Mapping[str, str],
    check: Check,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        name = setting.key.replace("_", "-")
        if name not in flags:
            hint = did_you_mean(name, flags)
            if name in owners:
                hint = f"it is a flag of {owners[name]}"
            raise setting.error(f"unknown key {quoted(setting.key)}", hint or "the keys are the flags' names")
        action = flags[name]
        if action.dest in found:
            raise setting.error(f"{name} is given twice", "keep one of them")
        if action.type is MODELS:
            found[action.dest] = _models(setting, flags, owners, check)
        elif setting.value is not None:
            found[action.dest] = value = _value(setting, name, action)
            try:
                check(action.dest, value)
            except QuireError as error:
                raise setting.error(error.message, error.hint) from None
    return found


def _models(
    setting: Setting, flags: Mapping[str, argparse.Action], owners: Mapping[str, str], check: Check
) -> dict[str, dict[str, Any]]:
    """Return the flags of each model by its name. Raises ConfigError for a flag that is of the server."""
    if not isinstance(setting.value, Nested) or not setting.value.all:
        raise setting.error(
            "models must be a mapping of names to flags", "write 'NAME: {model: ...}' below it"
        )
    found: dict[str, dict[str, Any]] = {}
    for model in setting.value.all:
        if model.key in found:
            raise model.error(f"model {quoted(model.key)} is given twice", "keep one of them")
        if not isinstance(model.value, Nested | None):
            raise model.error(f"model {quoted(model.key)} must have flags, got {_kind(model.value)}")
        inner = model.value.all if model.value is not None else ()
        found[model.key] = own = _read(inner, flags, owners, check)
        if others := sorted(own.keys() - OWN_FLAGS):
            name = others[0].replace("_", "-")
            raise model.error(f"{name} is for all models", f"put {name} beside `models`")
    return found


def _value(setting: Setting, name: str, action: argparse.Action) -> Any:
    """Convert a value to the type of its flag. Raises ConfigError."""
    value = setting.value
    if isinstance(action, Repeated):
        values = value if isinstance(value, list) else [value]
        return tuple(_scalar(setting, name, TEXT, one) for one in values)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise setting.error(f"{name} must be true or false, got {_kind(value)}")
        return value
    if not isinstance(action.type, OptionType):
        raise TypeError(f"--{name} has no OptionType")
    return _scalar(setting, name, action.type, value)


def _scalar(setting: Setting, name: str, kind: OptionType, value: Any) -> Any:
    if not isinstance(value, kind.in_file) or (isinstance(value, bool) and bool not in kind.in_file):
        hint = "put it in quotes" if str in kind.in_file and not isinstance(value, list | dict) else None
        raise setting.error(f"{name} must be {kind.expected}, got {_kind(value)}", hint)
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        problem, _, hint = str(error).partition("\nhint: ")
        raise setting.error(f"{name}: {problem}", hint or None) from None


def _kind(value: Any) -> str:
    """Name the type of a value. The value is not shown: it may be a misplaced secret."""
    return _WORDS.get(type(value), "something else")


@dataclass(frozen=True, slots=True)
class Nested:
    """A mapping within the file."""

    all: tuple[Setting, ...]


def _settings(path: str) -> Iterator[Setting]:
    """Yield the settings of a file in order. Raises ConfigError unless it is a plain mapping."""
    name, data = path[:200], read_limited(user_path(path), MAX_BYTES)
    try:
        text = data.decode()
        _check_plain(name, text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}: expected a mapping of flags", "write one 'key: value' on each line")
        yield from _pairs(name, loader, node)
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{place}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: not YAML in UTF-8") from None


def _pairs(name: str, loader: yaml.SafeLoader, node: yaml.MappingNode) -> Iterator[Setting]:
    for key_node, value_node in node.value:
        where = f"{name}, line {key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f"{where}: a key must be text, got {_kind(key)}")
        if isinstance(value_node, yaml.MappingNode):
            yield Setting(where, key, Nested(tuple(_pairs(name, loader, value_node))))
        else:
            yield Setting(where, key, loader.construct_object(value_node, deep=True))


def _check_plain(name: str, text: str) -> None:
    """Raise ConfigError for anchors, aliases and deep nesting, which could expand without bound."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        where = f"{name}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ConfigError(f"{where}: anchors and aliases are not supported", "write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}: nested too deep", "flags take values and lists of values")
