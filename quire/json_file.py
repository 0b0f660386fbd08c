"""JSON files of a model folder, read with a limit and with errors that name the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, quoted
from quire.regular_file import hint_for, read_limited

LIMIT_BYTES = 32 << 20
MAX_VALUES = 1 << 19  # in one file, not counting keys: each takes some 60 bytes of memory, and time
_AGAIN = hint_for(b"")


def read_json(path: Path, limit_bytes: int = LIMIT_BYTES, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError: no regular file, too large, not JSON, no object."""
    text = read_limited(path, limit_bytes)
    check_size(text, str(path), max_values)
    return parse_object(text, str(path))


def check_size(text: bytes, where: str, most: int) -> None:
    """Raise ConfigError for JSON with more than `most` values, before parsing it."""
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise ConfigError(f"{where}: too many values (limit {most:,})", _AGAIN)


def parse_object(text: bytes, where: str, decode: Callable[[bytes], Any] | None = None) -> dict[str, Any]:
    """Parse the JSON object in `text`. Raises ConfigError, beginning with `where`, unless it is one.

    A duplicate name in an object is an error, since parsers disagree about which one counts; unless a faster
    `decode` is given, for texts that no other parser reads.
    """
    try:
        value = decode(text) if decode else _decode(text, where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not valid JSON: {_first_line(error)}", hint_for(text)) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}", _AGAIN)
    return value


def _decode(text: bytes, where: str) -> Any:
    return json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, where))


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        (name, _), *_ = counted.most_common(1)
        raise ConfigError(f"{where}: {quoted(name)} is given twice", _AGAIN)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def half_characters(text: str) -> bool:
    """Return True if a text contains a lone surrogate, as JSON allows: no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
