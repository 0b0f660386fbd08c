"""Texts that calls spell literally, without quotes: which values are texts, and Lark for them.

A schema is split into its texts and the rest: {"type": ["string", "null"]} allows any text, or null. What a
model writes for such a parameter is the rest's value if it is JSON of one of its types, and a text otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.text.tools.functions import unanchored

MAX_LENGTH = 4096  # a larger maxLength is not enforced: counting would take too many states
_MAX_DEPTH = 16  # of references and alternatives
_DATE, _CLOCK = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_CLOCK})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_GROUP = "[0-9a-fA-F]{1,4}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\/=?^_`{|}~-]+"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"{_GROUP}(:{_GROUP}){{7}}|({_GROUP}:){{1,7}}(:{_GROUP}){{0,6}}|::({_GROUP}(:{_GROUP}){{0,6}})?",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>\"{}|\\^`]*",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
# How texts must not begin where other values are allowed: a reader could not tell them from those.
_OF_TYPE = {
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
    "number": r"-?[0-9](?s:.*)",
    "integer": r"-?[0-9](?s:.*)",
    "boolean": "([Tt]rue|[Ff]alse)",
    "null": "(null|None)",
}
_PYTHON = {"True": True, "False": False, "None": None}


class ValueSchemas(NamedTuple):
    """The schemas of the texts that a schema allows, and those of other values."""

    texts: tuple[Mapping[str, Any], ...]
    others: tuple[Any, ...]

    def types(self) -> frozenset[str]:
        """Return the JSON types of other values; all of them if a schema states none."""
        found = [one.get("type") if isinstance(one, Mapping) else None for one in self.others]
        return frozenset(kind if isinstance(kind, str) else "any" for kind in found)


class End(NamedTuple):
    """The mark that ends a text: as it is spelled, and in Lark, as a token perhaps."""

    text: str
    lark: str

    @property
    def lazy(self) -> str:
        return "" if self.lark.startswith("<[") else "[lazy]"


def split(schema: Any, root: Mapping[str, Any], depth: int = 0) -> ValueSchemas:
    """ValueSchemas a schema into its texts and the rest; `root` is what its references refer to."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ValueSchemas((), (schema,))
    if isinstance(reference := schema.get("$ref"), str):
        return split(_referred(root, reference), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        rest = tuple({"type": _type(value), "const": value} for value in values if not isinstance(value, str))
        return ValueSchemas(({"enum": texts},) if texts else (), rest)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and "type" not in schema:
            if name == "allOf" and len(schema[name]) > 1:
                break
            parts = [split(part, root, depth + 1) for part in schema[name]]
            return ValueSchemas(sum((p.texts for p in parts), ()), sum((p.others for p in parts), ()))
    kind = schema.get("type")
    if isinstance(kind, list):
        parts = [split({**schema, "type": one}, root, depth + 1) for one in kind]
        return ValueSchemas(sum((p.texts for p in parts), ()), sum((p.others for p in parts), ()))
    return ValueSchemas((schema,), ()) if kind == "string" else ValueSchemas((), (schema,))


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def value_of(text: str, found: ValueSchemas) -> str:
    """Return JSON for the whole text of a value: of one of the other types if it is such, else a string."""
    types = found.types()
    if any(text in listed for one in found.texts if isinstance(listed := one.get("enum"), list)):
        return json.dumps(text, ensure_ascii=False)
    try:
        stripped = text.strip()
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(stripped, parse_constant=int)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "string" if isinstance(value, str) else _type(value)
    of_number = kind == "integer" and "number" in types
    if found.texts and (kind == "string" or not (kind in types or "any" in types or of_number)):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value) if stripped in _PYTHON else stripped


def text_rules(name: str, found: ValueSchemas, end: End) -> list[str]:
    """Return rule `name`, a text of this split up to and including its end, and its terminals.

    The rules of `string_rules` must be among the others.
    """
    barred = [f"~(/{_OF_TYPE[kind]}/)" for kind in sorted(found.types() & _OF_TYPE.keys())]
    rules, alternatives = [], []
    for index, schema in enumerate(found.texts):
        if isinstance(schema.get("enum"), list):
            texts = [text for text in schema["enum"] if end.text not in text]
            alternatives += [f"{literal(text)} {end.lark}" for text in texts]
            continue
        terminal = f"{name.upper()}_{index}"
        parts = " & ".join((*_terminals(schema), *barred, "STRING"))
        rules += [f"{name}_{index}{end.lazy}: {terminal} {end.lark}", f"{terminal}: {parts}"]
        alternatives.append(f"{name}_{index}")
    return [f"{name}: {' | '.join(alternatives) or '/(?!)/'}", *rules]


def string_rules(end: End) -> str:
    """Return Lark for any text before its end, and for such a text with its end."""
    string = f"STRING: /(?s:.*)/ & ~(/(?s:.*)/ {literal(end.text)} /(?s:.*)/)"
    return f"string{end.lazy}: STRING {end.lark}\n{string}"


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _terminals(schema: Mapping[str, Any]) -> list[str]:
    """Return expressions of Lark, all of which a text of this schema matches."""
    found = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(most, int) and most <= MAX_LENGTH:
        found.append(f"/(?s:.{{{least},{most}}})/")
    elif isinstance(least, int) and 0 < least <= MAX_LENGTH:
        found.append(f"/(?s:.{{{least},}})/")
    if isinstance(name := schema.get("format"), str) and name in _FORMATS:
        found.append(f"/{_FORMATS[name]}/")
    also = schema.get("allOf")
    for part in (schema, *(also if isinstance(also, list) else ())):
        if isinstance(part, Mapping) and isinstance(part.get("pattern"), str):
            found.append(_matching(part["pattern"]))
    return found


def _matching(pattern: str) -> str:
    """Return an expression for texts with a match of a JSON schema's pattern anywhere."""
    bare, *anchors = unanchored(pattern)
    begin, end = ("" if anchored else "(?s:.*)" for anchored in anchors)
    escaped = re.sub(r"(?s)\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), bare)
    return f"/{begin}(?:{escaped}){end}/"


_IN_LARK = {"/": r"\/", "\n": r"\n"}


def texts_only(found: ValueSchemas) -> bool:
    """Return True if every value is a text, which can be passed on as it comes."""
    return bool(found.texts) and not found.others
