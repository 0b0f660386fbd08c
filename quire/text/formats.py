"""Formats that llguidance takes wider than they are (RFC 3339), or endless: 29 February needs a leap year."""

from __future__ import annotations

from typing import Any

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
# Without leap seconds: few of them were, and fewer readers take one. To the nanosecond at most: a small model
# does not end what need not end.
_SECONDS = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?[^0-9.]"
_PATTERNS = {"date": f"^{_DAY}", "time": f"^{_SECONDS}", "date-time": f"^{_DAY}.*[Tt]{_SECONDS}"}

_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords with values that are no schemas
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def narrowed(schema: Any) -> Any:
    """A JSON schema, or a part of one, that demands of formats also what llguidance leaves out of them."""
    if isinstance(schema, list):
        return [narrowed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _narrowed_value(key, value) for key, value in schema.items()}
    name, parts = schema.get("format"), found.get("allOf", [])
    if isinstance(name, str) and name in _PATTERNS and isinstance(parts, list):
        found["allOf"] = [*parts, {"pattern": _PATTERNS[name]}]
    return found


def _narrowed_value(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: narrowed(part) for name, part in value.items()}
    return value if key in _VALUES else narrowed(value)
