"""Shared parts of the formats in which each parameter of a call has tags of its own.

A text is written literally, any other value as JSON (see `texts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, JsonCalls, JsonScanner, Reading
from quire.text.tools.texts import (
    End,
    ValueSchemas,
    literal,
    split,
    string_rules,
    text_rules,
    texts_only,
    value_of,
)

_SHARED = ("$defs", "definitions", "x-guidance")  # keywords of a schema that schemas of its properties need
_UNKNOWN, _ANY_TEXT = ValueSchemas((), ({},)), ValueSchemas(({"type": "string"},), ())


class TaggedCalls(JsonCalls):
    """A format of this family. A subclass defines its tags as format strings, detection, and its reader.

    A call is `head`, its parameters, and `tail`; a parameter is `opening_tag`, a value and `value_end`.
    """

    head: str
    opening_tag: str
    value_end: str
    after_value: str = ""
    tail: str

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules: the parameters of the schema in its order, and no others."""
        first, further, end = self.calls(mark)
        more = f"({further}){{0,{self.max_calls - 1}}}" if several else ""
        each = [self._rules(number, function, mark) for number, function in enumerate(functions)]
        alternatives = " | ".join(f"call_{number}" for number in range(len(functions)))
        rules = (f"calls: {first} {more} {end}", f"call: {alternatives}", *each)
        return "\n".join((*rules, string_rules(End(self.value_end, self._lark(self.value_end, mark)))))

    def _rules(self, number: int, function: Function, mark: Callable[[str], str]) -> str:
        """Return rule `call_NUMBER` and those of its parameters."""
        schema, required = function.schema, function.schema.get("required")
        shared = {name: schema[name] for name in _SHARED if name in schema}
        parameters, rules = [], []
        for index, (name, own) in enumerate(properties_of(function).items()):
            rule = f"value_{number}_{index}"
            values, own_rules = self._value(rule, split(own, schema), shared, mark)
            rules += own_rules
            tag = self._lark(self.opening_tag.format(key=name), mark)
            whole = f"({tag} ({' | '.join(values)}) {self._lark(self.after_value, mark)})"
            parameters.append(whole if isinstance(required, list) and name in required else whole + "?")
        head, tail = self._lark(self.head.format(name=function.name), mark), self._lark(self.tail, mark)
        return "\n".join((f"call_{number}: {head} {' '.join(parameters)} {tail}", *rules))

    def _value(
        self, rule: str, found: ValueSchemas, shared: Mapping[str, Any], mark: Callable[[str], str]
    ) -> tuple[list[str], list[str]]:
        """Return alternatives for a value and the tag that ends it, and their rules."""
        end = End(self.value_end, self._lark(self.value_end, mark))
        if found == _ANY_TEXT:
            return ["string"], []
        values, rules = [], []
        if found.texts:
            values.append(f"{rule}_text")
            rules += text_rules(f"{rule}_text", found, end)
        for place, other in enumerate(found.others):
            whole = {**other, **shared} if isinstance(other, Mapping) else other
            values.append(f"{rule}_{place} {end.lark}")
            rules.append(f"{rule}_{place}: %json {json.dumps(whole)}")
        return values, rules

    def _lark(self, tag: str, mark: Callable[[str], str]) -> str:
        """Return Lark for a text in which marks may be tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, self.tokens))})", tag)
        return " ".join(mark(part) if part in self.tokens else literal(part) for part in parts if part)


def properties_of(function: Function) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters. Raises RequestError if they are no object."""
    properties = function.schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"the properties of {function.name!r} are not an object", None, "tools")
    return properties


class TaggedReader(JsonCallReader):
    """Reader that turns parameters into JSON: texts incrementally, other values as a whole."""

    def __init__(self, syntax: TaggedCalls, functions: Sequence[Function]) -> None:
        self._splits = {
            function.name: {
                name: split(own, function.schema) for name, own in properties_of(function).items()
            }
            for function in functions
        }
        self._end = syntax.value_end
        self._name, self._seen = "", set[str]()
        super().__init__(syntax, frozenset(self._splits))

    def _begin_call(self, name: str) -> None:
        """Begin a call of this function: its parameters follow."""
        self._name, self._seen = self._known(name.strip()), set()
        self._start(self._name)
        self._emit_arguments("{")

    def _end_call(self) -> None:
        self._emit_arguments("}")
        self._unparsed, self._whole = [], True

    def _read_parameter(self, parameter: str) -> Reading[None]:
        """Parse the value of a parameter and the tag that ends it."""
        if parameter in self._seen:
            raise ValueError
        self._emit_arguments(f"{', ' if self._seen else ''}{literal(parameter)}: ")
        self._seen.add(parameter)
        found = self._splits[self._name].get(parameter, _UNKNOWN)
        if texts_only(found):
            self._emit_arguments('"')
            yield TextScanner(self._end, lambda text: self._emit_arguments(literal(text)[1:-1]))
            self._emit_arguments('"')
        else:
            pieces: list[str] = []
            yield TextScanner(self._end, pieces.append)
            self._emit_arguments(value_of("".join(pieces), found))


class TextScanner(JsonScanner):
    """Incremental search for the mark that ends a text; passes on what is before it.

    The first character of the mark must not occur again in it.
    """

    def __init__(self, end: str, take: Callable[[str], object]) -> None:
        self.done = self.broken = False
        self._end = end
        self._take = take
        self._num_matched = 0  # characters of the mark

    def push(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if not self._num_matched:
                begin = text.find(self._end[0], at)
                self._take(text[at : begin if begin >= 0 else len(text)])
                at, self._num_matched = (begin + 1, 1) if begin >= 0 else (len(text), 0)
            elif text[at] == self._end[self._num_matched]:
                at, self._num_matched = at + 1, self._num_matched + 1
                self.done = self._num_matched == len(self._end)
            else:
                self._take(self._end[: self._num_matched])
                self._num_matched = 0
        return at
