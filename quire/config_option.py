"""Options of a configuration: dataclass fields with a help text and rules for their values."""

from __future__ import annotations

import math
from dataclasses import Field, field
from typing import Any

from quire.errors import ConfigError


def option(default: Any, help: str, **rules: Any) -> Any:
    """Return a field with this default and help text; `rules` are those that `check_value` knows."""
    return field(default=default, metadata={"help": help, **rules})


def check_value(field: Field[Any], value: Any) -> None:
    """Raise ConfigError unless a value has the type and range of its field."""
    name, default, rule = field.name, field.default, field.metadata
    if value is None and default is None:
        return
    if choices := rule.get("choices"):
        if isinstance(value, str) and is_numbered(value, rule.get("numbered", ())):
            return
        if value not in choices or isinstance(value, bool):
            hint = (
                rule["instead"] if value in rule.get("misread", ()) else f"choose one of {_listed(choices)}"
            )
            raise ConfigError(f"{name} = {value!r} is not possible", hint)
        return
    if rule.get("duration"):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value!r} is not a duration", "give seconds, more than 0")
        return
    if rule.get("many"):
        if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
            raise ConfigError(f"{name} = {value!r}: expected a tuple of non-empty strings")
        return
    if rule.get("range") and isinstance(value, tuple):
        if len(value) != 2 or not value[0] < value[1]:
            raise ConfigError(f"{name} = {value!r} is not a range", "give the least and the most: 2-8")
        for one in value:
            check_value(field, one)
        return
    kind = bool if isinstance(default, bool) else int if "low" in rule else str
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        problem = f"{name} = {value!r}: expected {kind.__name__}, got {type(value).__name__}"
        raise ConfigError(problem, rule.get("instead"))
    if "misread" in rule and str(value).lower() in rule["misread"]:
        raise ConfigError(f"{name} = {value!r} is not possible", rule["instead"])
    low, high = rule.get("low"), rule.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"from {low:,} to {high:,}" if high is not None else f"at least {low:,}"
        raise ConfigError(f"{name} = {value:,} is out of range", f"give a number {bound}")


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, choices))


def is_numbered(value: str, names: tuple[str, ...]) -> bool:
    """Return True for one of the names followed by a number: "cuda:1"."""
    name, separator, number = value.partition(":")
    return bool(separator) and name in names and number.isascii() and number.isdigit() and len(number) <= 3
