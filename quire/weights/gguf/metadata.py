"""The metadata of a GGUF file, read with types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted

_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """Keys and values of the file `where`: numbers, texts, lists of texts, arrays of numbers."""

    where: str
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str) -> str | None:
        """Return a text, None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._fault(key, value, "a text")
        return value

    def size(self, key: str, default: int | None = None, most: int = _MOST, least: int = 1) -> int:
        """Return a positive integer, or that of all layers where the file has one for each.

        Raises ConfigError for anything else, and for a missing one without a default.
        """
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if value.min() != value.max():
                raise ConfigError(f"{self.where}: {key} differs between layers, which is not supported")
            value = int(value[0])
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._fault(key, value, "a size")
        return value

    def optional_size(self, key: str) -> int | None:
        """Return a positive integer; None if it is absent or 0."""
        return self.size(key, 0, least=0) or None

    def number(self, key: str) -> float | None:
        """Return a number, None if absent."""
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._fault(key, value, "a number")
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """Return a boolean, None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._fault(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, empty if absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self._fault(key, value, "a list of texts")
        return value

    def numbers(self, key: str) -> list[int] | list[float]:
        """Return a list of numbers, empty if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise self._fault(key, value, "a list of numbers")
        return [] if value is None else value.tolist()

    def _fault(self, key: str, value: Any, expected: str) -> ConfigError:
        if value is None:
            return ConfigError(f"{self.where}: the metadata has no {quoted(key)}", "is the file complete?")
        return ConfigError(f"{self.where}: {key} = {quoted(value)} is not {expected}")
