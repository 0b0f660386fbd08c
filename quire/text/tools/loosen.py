"""Repair of the schemas of tools, so that a grammar can enforce the rest of them, with warnings.

Only parts that no grammar can enforce are changed: unknown types, dangling references, keywords that are
malformed or that llguidance lacks. The schema of a `strict` tool is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from quire.errors import quoted

JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Keywords by which a schema states itself if further properties are allowed.
OPEN = frozenset(
    ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "unevaluatedProperties")
)
# Keywords that llguidance lacks, and the values with which they have no effect.
UNENFORCED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "contains", "maxContains"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("else", "if", "propertyNames", "then"), ({}, True)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), ({}, True)),
    **dict.fromkeys(("minContains", "not", "uniqueItems"), (False,)),
}
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
_TYPES = {
    **dict.fromkeys(("str", "text", "char"), "string"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("int", "long", "int32", "int64"), "integer"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}
_LARGEST, _SMALLEST = 2.0**63 - 1024, 1e-30  # of bounds that llguidance can turn into expressions
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that name a schema, and the values that llguidance accepts; others are dropped without a warning.
_NAMES_OF_SCHEMAS = {
    "$schema": r"https?://json-schema\.org/.*",
    "$id": r"[!-~]+",
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), r"(?!)"),
}
# Look-around, atomic groups, comments, backreferences, boundaries of words and of text
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!>#]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[bBAZzGk0-9])")

Warn = Callable[[str], object]


def loosened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a schema of parameters without the parts that no grammar can enforce, and a warning for each."""
    warnings: list[str] = []
    found = _Loosening(schema, warnings.append).schema(schema, "")
    return found, warnings


def looser(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield ever wider schemas for one that does not compile, each with a warning of what it omits."""
    wide = _without(schema, frozenset())
    yield wide, "oneOf is taken as anyOf"
    wide = _without(wide, frozenset(("pattern", "patternProperties", "format", *_BOUNDS)))
    yield wide, "patterns, formats and bounds of numbers are not enforced"
    yield _outline(schema), "only the names and types of its parameters are enforced"
    yield {"type": "object"}, "its parameters may be any object"


class _Loosening:
    """One traversal of a schema. `warn` is called with every change."""

    def __init__(self, root: Mapping[str, Any], warn: Warn) -> None:
        self._root = root
        self._warn = warn

    def schema(self, schema: Any, where: str) -> Any:
        """Repair a part of the schema. `where` is the path to it: properties and keywords, joined by dots."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._warn(f"{_named(where)} is not a schema, so any value is allowed")
            return {}
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if value is None:  # as good as absent, except where null is a value
                kept, is_kept = None, key in ("const", "default")
            else:
                kept = self._value(key, value, schema, where)
                is_kept = kept is not None
            if is_kept:
                found[key] = kept
        self._require(found, schema, where)
        return found

    def _value(self, key: str, value: Any, schema: Mapping[str, Any], where: str) -> Any:
        """Return the repaired value of a keyword, or None to drop it."""
        if key == "type":
            return self._type(value, where)
        if key in _NAMED:
            return self._parts(key, value, where)
        if key in _SCHEMAS and not isinstance(value, list):
            return self.schema(value, f"{where}.{key}")
        if key in _LISTS or key in _SCHEMAS:
            if isinstance(value, list):
                return [self.schema(part, f"{where}.{key}") for part in value]
            return self._drop(key, where, "is not a list")
        problem = self._problem(key, value, schema)
        if problem is None:
            return int(value) if key in _COUNTS else value
        return self._drop(key, where, problem) if problem else None

    def _problem(self, key: str, value: Any, schema: Mapping[str, Any]) -> str | None:
        """Return why a keyword is to be dropped: "" to do so without a warning, None to keep it."""
        problem: str | None = None
        if key in UNENFORCED:
            problem = "" if value in UNENFORCED[key] else "is not enforced"
        elif key == "pattern":
            problem = _pattern_problem(value)
        elif key == "format" and schema.get("type", "string") not in ("integer", "number", "boolean"):
            known = isinstance(value, str) and value in FORMATS
            problem = None if known else f"is {quoted(value)}, which is not enforced"
        elif key in _BOUNDS:
            problem = _bound_problem(key, value)
        elif key in _COUNTS:
            problem = _count_problem(key, value, schema)
        elif key == "$ref":
            problem = self._reference_problem(value)
        elif key == "enum" and not isinstance(value, list):
            problem = "is not a list"
        elif key in _NAMES_OF_SCHEMAS and not re.fullmatch(_NAMES_OF_SCHEMAS[key], str(value)):
            problem = ""
        return problem

    def _type(self, value: Any, where: str) -> Any:
        """Return JSON's types for common other names; None for any type."""
        names = value if isinstance(value, list) else [value]
        types = [name.lower() if isinstance(name, str) else name for name in names]
        types = [_TYPES.get(name, name) if isinstance(name, str) else name for name in types]
        if types == names and types and all(name in JSON_TYPES for name in types):
            return value
        if not types or not all(name in JSON_TYPES for name in types):
            return self._drop("type", where, f"is {quoted(value)}, which is taken as any type")
        known = list(dict.fromkeys(types))
        self._drop("type", where, f"is {quoted(value)}, which is taken as {' or '.join(known)}")
        return known if isinstance(value, list) else known[0]

    def _parts(self, key: str, value: Any, where: str) -> Any:
        """Repair schemas by name."""
        if not isinstance(value, Mapping):
            return self._drop(key, where, "is not an object")
        inside = where if key == "properties" else f"{where}.{key}"
        parts = {}
        for name, part in value.items():
            if key == "patternProperties" and _pattern_problem(name):
                self._warn(f"{_named(f'{inside}.{name}')} is not enforced: its expression is not regular")
            else:
                parts[name] = self.schema(part, f"{inside}.{name}")
        return parts

    def _require(self, found: dict[str, Any], schema: Mapping[str, Any], where: str) -> None:
        """Keep only those names in `required` that the schema allows."""
        required, listed = found.get("required"), found.get("properties", {})
        if required is None:
            return
        if not isinstance(required, list):
            del found["required"]
            self._drop("required", where, "is not a list")
            return
        closed = found.get("additionalProperties") is False and "patternProperties" not in found
        closed = closed or (not where and "properties" in found and not schema.keys() & OPEN)
        missing = [one for one in required if not isinstance(one, str) or (closed and one not in listed)]
        if missing:
            found["required"] = [one for one in required if one not in missing]
            self._drop("required", where, f"names {quoted(missing[0])}, which is not among its properties")

    def _reference_problem(self, reference: Any) -> str | None:
        if not isinstance(reference, str):
            return "is not text"
        if not reference.startswith("#"):
            return f"is {quoted(reference)}, outside this schema, so any value is allowed"
        place: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and step.isdecimal():
                place = dict(enumerate(place)).get(int(step[:9]))
            else:
                place = place.get(step) if isinstance(place, Mapping) else None
        if not isinstance(place, Mapping | bool):
            return f"is {quoted(reference)}, which does not exist, so any value is allowed"
        return None

    def _drop(self, key: str, where: str, problem: str) -> None:
        """Warn of a keyword that is dropped."""
        self._warn(f"{key} of {_named(where)} {problem}")


def _named(where: str) -> str:
    return quoted(where.lstrip(".")) if where else "the parameters"


def _pattern_problem(pattern: Any) -> str | None:
    if not isinstance(pattern, str):
        return "is not text"
    if _BEYOND_REGULAR.search(pattern):
        return "is not enforced: it is more than a regular expression"
    return None


def _bound_problem(key: str, value: Any) -> str | None:
    if isinstance(value, bool) and key.startswith("exclusive"):
        return None  # as in draft 4
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "is not a number"
    if (key == "multipleOf" and value <= 0) or abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
        return "is not enforced: it is too large or too small"
    return None


def _count_problem(key: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        return "is not a whole number of 0 or more"
    if key.endswith("Properties"):
        listed, required = schema.get("properties"), schema.get("required")
        required = required if isinstance(required, list) else []
        if isinstance(listed, Mapping) and any(name not in required for name in listed):
            return "is not enforced"
    return None


def _without(part: Any, names: frozenset[str], named: bool = False) -> Any:
    """Return a schema, or schemas by name if `named`, without these keywords and with anyOf for oneOf."""
    if isinstance(part, list):
        return [_without(one, names) for one in part]
    if not isinstance(part, Mapping):
        return part
    kept = {}
    for key, value in part.items():
        if named or key not in ("enum", "const", "default", "examples"):
            value = _without(value, names, not named and key in _NAMED)
        if named or key not in names:
            kept[key] = value
    if not named and "patternProperties" in names & part.keys():
        kept.pop("additionalProperties", None)
    if not named and isinstance(kept.get("oneOf"), list):
        parts = kept.get("allOf")
        kept["allOf"] = [*(parts if isinstance(parts, list) else ()), {"anyOf": kept.pop("oneOf")}]
    return kept


def _outline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the names and types of parameters and which are required."""
    properties, required = schema.get("properties"), schema.get("required")
    outline: dict[str, Any] = {"type": "object"}
    if isinstance(properties, Mapping):
        outline["properties"] = {
            name: {"type": part["type"]} if isinstance(part, Mapping) and "type" in part else {}
            for name, part in properties.items()
        }
        outline["additionalProperties"] = schema.get("additionalProperties") is not False
        if isinstance(required, list):
            outline["required"] = [name for name in required if name in properties]
    return outline
