"""Strict date and time formats for JSON schemas.

llguidance accepts more than RFC 3339 does, such as 29 February of any year, and fractions of any length.
"""

from __future__ import annotations

from typing import Any

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
# Without leap seconds, which few parsers accept. To the nanosecond at most: a small model may write digits
# without end.
_SECONDS = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?[^0-9.]"
_PATTERNS = {"date": f"^{_DAY}", "time": f"^{_SECONDS}", "date-time": f"^{_DAY}.*[Tt]{_SECONDS}"}

_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are not schemas
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def tighten_formats(schema: Any) -> Any:
    """Return a JSON schema, or a part of one, with patterns added where llguidance's formats are too wide."""
    if isinstance(schema, list):
        return [tighten_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _tighten_value(key, value) for key, value in schema.items()}
    name, parts = schema.get("format"), found.get("allOf", [])
    if isinstance(name, str) and name in _PATTERNS and isinstance(parts, list):
        found["allOf"] = [*parts, {"pattern": _PATTERNS[name]}]
    return found


def _tighten_value(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: tighten_formats(part) for name, part in value.items()}
    return value if key in _VALUES else tighten_formats(value)
