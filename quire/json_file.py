"""JSON files of a model folder, read with a limit and with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.regular_file import read_limited

LIMIT_BYTES = 64 << 20
_AGAIN = "the file is damaged or incomplete: fetch it again"


def read_json(path: Path, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError: no regular file, too large, not JSON, not an object."""
    return parse_object(read_limited(path, limit_bytes), str(path))


def parse_object(text: bytes, where: str, decode: Callable[[bytes], Any] | None = None) -> dict[str, Any]:
    """The JSON object in `text`; ConfigError, beginning with `where`, unless it is one.

    A name given twice in one object is an error, as readers disagree about which of the two counts; unless
    a faster `decode` is given, which is for texts that nobody reads again.
    """
    try:
        value = decode(text) if decode else _decode(text, where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not valid JSON: {_first_line(error)}", _AGAIN) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}", _AGAIN)
    return value


def _decode(text: bytes, where: str) -> Any:
    return json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, where))


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{where}: {name!r} is given twice", _AGAIN)
        found[name] = value
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
