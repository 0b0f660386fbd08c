"""Shared parts of the formats whose arguments are values in another notation than JSON.

The grammar spells the values that a schema allows in that notation. The reader turns them into JSON as they
come: texts incrementally, numbers and names as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from quire.errors import RequestError
from quire.text.tools.functions import Function
from quire.text.tools.json_calls import MAX_NESTING, JsonCallReader, Reading
from quire.text.tools.tagged import properties_of
from quire.text.tools.texts import MAX_LENGTH, ValueSchemas, literal, split

_SPACE = " \t\r\n"
_NAMES = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_BARE = 4096  # characters of a value without quotes
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_OF_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BEYOND = ("allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties")

Key = Callable[[str], str]  # Lark for a name and what follows it


class LiteralRules:
    """Lark rules for the values of one function's parameters. A subclass defines the notation.

    Objects have the properties of their schema, in one order. A value whose schema has keywords that cannot
    be expressed may be any; a strict function with such a schema is refused.
    """

    comma = ", "
    words: ClassVar[Mapping[str, str]]  # Lark for true, false and null
    any_key: str  # Lark for any name in an object, and what follows it

    def __init__(self, number: int, function: Function, mark: Callable[[str], str]) -> None:
        self.rules: list[str] = []
        self._mark = mark
        self._function = function
        self._prefix = f"value_{number}"
        self._named: dict[str, str] = {}  # schemas -> rules

    def key(self, name: str) -> str:
        """Return Lark for the name of a property and what follows it."""
        raise NotImplementedError

    def text(self, text: str) -> str:
        """Return Lark for one text in its quotes."""
        raise NotImplementedError

    def texts(self, name: str, found: ValueSchemas) -> str:
        """Return Lark for the texts of these schemas, in quotes. Rules that it needs begin with `name`."""
        raise NotImplementedError

    def order(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of an object's properties as models write them."""
        return names

    def parameters(self, key: Key, any_key: str) -> str:
        """Return Lark for the arguments of a call, each after `key` of its name."""
        properties_of(self._function)  # refuses what is no object
        return self._members(self._prefix, self._function.schema, key, any_key)

    def _value(self, schema: Any) -> str:
        """Return the rule for values of a schema."""
        stated = json.dumps(schema, sort_keys=True)
        if stated not in self._named:
            name = self._named[stated] = f"{self._prefix}_{len(self._named)}"
            found = split(schema, self._function.schema)
            parts = [self.texts(name, found)] if found.texts else []
            parts += [self._other(f"{name}_{place}", one) for place, one in enumerate(found.others)]
            self.rules.append(f"{name}: {' | '.join(parts)}")
        return self._named[stated]

    def _other(self, name: str, schema: Any) -> str:
        """Return Lark for values that are no texts."""
        schema = schema if isinstance(schema, Mapping) else {}
        if self._function.strict and (beyond := [one for one in _BEYOND if one in schema]):
            problem = f"{self._function.name}: {beyond[0]} cannot be enforced in this model's format of calls"
            raise RequestError(problem, "leave strict out", "tools")
        kind = schema.get("type")
        if "const" in schema:
            return self._spelled(schema["const"])
        if kind in ("integer", "number"):
            self.rules.append(
                f"{name}: %json {json.dumps({k: schema[k] for k in _OF_NUMBERS if k in schema})}"
            )
            return name
        if kind == "boolean":
            return f"{self.words['true']} | {self.words['false']}"
        if kind == "null":
            return self.words["null"]
        if kind == "array" or (kind is None and "items" in schema):
            return self._list(schema)
        if kind == "object" or (kind is None and "properties" in schema):
            return f'"{{" {self._members(name, schema, self.key, self.any_key)} "}}"'
        kinds = ("string", "number", "boolean", "null", "array", "object")
        return " | ".join(self._value({"type": one}) for one in kinds)

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", {}))
        least, most = (_count(schema.get(key)) for key in ("minItems", "maxItems"))
        if most == 0:
            return '"[]"'
        further = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
        inside = f"{item} ({literal(self.comma)} {item}){further}"
        return f'"[" {inside} "]"' if least else f'"[" ({inside})? "]"'

    def _members(self, name: str, schema: Mapping[str, Any], key: Key, any_key: str) -> str:
        """Return the rule for the members of an object, of which the optional ones may be missing."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, Mapping) else {}
        required = required if isinstance(required, list) else []
        further = schema.get("additionalProperties", not properties)
        members = [
            (key(one), self._value(properties[one]), one in required) for one in self.order([*properties])
        ]
        more, first = '""', '""'
        if further is not False:
            pair, comma = f"{any_key} {self._value(further)}", literal(self.comma)
            more, first = f"({comma} {pair})*", f"({pair} ({comma} {pair})*)?"
        for place, (opening, value, is_required) in reversed([*enumerate(members)]):
            self.rules += [f"{name}_more_{place + 1}: {more}", f"{name}_first_{place + 1}: {first}"]
            pair, rest = f"{opening} {value}", f"{name}_more_{place + 1}"
            more = f"{literal(self.comma)} {pair} {rest}" + ("" if is_required else f" | {rest}")
            first = f"{pair} {rest}" + ("" if is_required else f" | {name}_first_{place + 1}")
        self.rules.append(f"{name}_members: {first}")
        return f"{name}_members"

    def _spelled(self, value: Any) -> str:
        """Return Lark for one value."""
        comma = f" {literal(self.comma)} "
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return f'"[" {comma.join(map(self._spelled, value))} "]"'
        if isinstance(value, Mapping):
            pairs = (f"{self.key(one)} {self._spelled(value[one])}" for one in self.order([*value]))
            return f'"{{" {comma.join(pairs)} "}}"'
        stated = json.dumps(value)
        return self.words.get(stated) or literal(stated)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= MAX_LENGTH else None


class LiteralReader(JsonCallReader):
    """Reader of this family. A subclass parses calls, and texts in its own quotes."""

    quotes: str  # characters that begin a text

    def _read_text(self, first: str) -> Reading[str]:
        """Parse a text after its first character; pass it on in JSON. Return the character after it."""
        raise NotImplementedError

    def _read_name(self, first: str, end: str) -> Reading[str]:
        """Parse a name up to and including `end`, in quotes or without."""
        text = first
        while (char := (yield None)) != end:
            text += char
            if len(text) > _MAX_BARE:
                raise ValueError
        name = text.strip().strip("\"'").removeprefix('<|"|>').removesuffix('<|"|>')
        if not name:
            raise ValueError
        return name

    def _read_fields(self, between: str, end: str, depth: int = 0) -> Reading[None]:
        """Parse names and values up to `end`, as an object; `between` is what follows a name."""
        self._emit_arguments("{")
        seen = set[str]()
        char = yield from after_space()
        while char != end:
            name = yield from self._read_name(char, between)
            if name in seen:
                raise ValueError
            self._emit_arguments(f"{', ' if seen else ''}{literal(name)}: ")
            seen.add(name)
            char = yield from self._read_value((yield from after_space()), depth)
            if char == ",":
                char = yield from after_space()
            elif char != end:
                raise ValueError
        self._emit_arguments("}")

    def _read_value(self, first: str, depth: int) -> Reading[str]:
        """Parse a value that begins with `first`. Return the first character after it that is no space."""
        if depth > MAX_NESTING:
            raise ValueError
        if first in self.quotes:
            return (yield from self._read_text(first))
        if first == "{":
            yield from self._read_fields(":", "}", depth + 1)
        elif first in _CLOSING:
            yield from self._read_list(_CLOSING[first], depth + 1)
        else:
            return (yield from self._read_bare(first))
        return (yield from after_space())

    def _read_list(self, end: str, depth: int) -> Reading[None]:
        self._emit_arguments("[")
        char, before = (yield from after_space()), ""
        while char != end:
            self._emit_arguments(before)
            char, before = (yield from self._read_value(char, depth)), ", "
            if char == ",":
                char = yield from after_space()
            elif char != end:
                raise ValueError
        self._emit_arguments("]")

    def _read_bare(self, first: str) -> Reading[str]:
        """Parse a number or a name, which is a text if it has no meaning. Return what follows it."""
        text, char = "", first
        while char not in ",)]}":
            text += char
            if len(text) > _MAX_BARE:
                raise ValueError
            char = yield None
        text = text.strip()
        if not text:
            raise ValueError
        try:
            json.loads(text, parse_constant=int)
            self._emit_arguments(text)
        except ValueError:
            self._emit_arguments(_NAMES.get(text.lower()) or literal(text))
        return char


def after_space() -> Reading[str]:
    """Skip white space; return the character after it."""
    while (char := (yield None)) in _SPACE:
        pass
    return char
