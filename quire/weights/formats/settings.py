"""Settings: the quantization_config of a checkpoint, read with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError, quoted

_MOST_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class Settings:
    """The fields of `quantization_config`, or of an object in it (`where`)."""

    values: Mapping[str, Any]
    where: str = "quantization_config"

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these fields that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = 1 << 20) -> int:
        """Return an integer from `low` to `high`, spelled in one of several ways. Raises ConfigError."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fault(names[0], value)
        return value

    def group_size(self, *names: str, default: int | None = None) -> int | None:
        """Return the inputs of a group, None for all of a row, stated as -1. Raises ConfigError."""
        size = self.integer(*names, default=default, low=-1)
        if size == 0:
            raise self.fault(names[0], size)
        return None if size < 0 else size

    def one_of(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """Return a value of those allowed. Raises ConfigError for any other."""
        value = self.get(name, default=default)
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise self.fault(name, value)
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.fault(names[0], value)
        return value

    def names(self, *fields: str) -> tuple[str, ...]:
        """Return a list of names or patterns; empty if none of these fields is there."""
        value = self.get(*fields, default=[])
        if not isinstance(value, list) or len(value) > _MOST_NAMES:
            raise self.fault(fields[0], value)
        if not all(isinstance(name, str) for name in value):
            raise self.fault(fields[0], value)
        return tuple(value)

    def inner(self, name: str) -> Settings | None:
        """Return an object in a field, None if it is missing, null or empty. Raises ConfigError."""
        value = self.values.get(name)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(name, value)
        return Settings(value, f"{self.where}.{name}")

    def fault(self, name: str, value: Any) -> ConfigError:
        """Return an error about the value of a field."""
        what = "is missing" if value is None else f"= {quoted(value)} is not supported"
        return ConfigError(f"config.json: {self.where}.{name} {what}")
