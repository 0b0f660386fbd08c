"""The format of Qwen3-Coder and Qwen3.5: tags for the function and for each of its parameters.

A string parameter is written literally, any other as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.tools.functions import Function, unanchored
from quire.text.tools.json_calls import (
    JsonCallReader,
    JsonCalls,
    JsonScanner,
    Reading,
    exactly,
    expect,
    until,
)

_END = "\n</parameter>"
_SHARED = ("$defs", "definitions", "x-guidance")  # keywords of a schema that schemas of its properties need
_RULES = rf"""string[lazy]: STRING {json.dumps(_END)}
STRING: /(?s:.*)/ & ~(/(?s:.*)/ {json.dumps(_END)} /(?s:.*)/)"""


class QwenXml(JsonCalls):
    """`<tool_call>`, `<function=NAME>`, `<parameter=NAME>`, the value, and the three closing tags."""

    name = "qwen_xml"
    marker = "<tool_call>"
    closing = "</tool_call>"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for all tags of the format."""
        return all(tag in source for tag in (cls.marker, "<function=", "<parameter=", "</parameter>"))

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules: the parameters of the schema in its order, and no others.

        For strings, only `enum` and `pattern` are enforced.
        """
        call = rf'"\n" call "\n" {mark(self.closing)}'
        more = rf'("\n" {mark(self.marker)} {call}){{0,{self.max_calls - 1}}}' if several else ""
        each = [_rules(number, function) for number, function in enumerate(functions)]
        alternatives = " | ".join(f"call_{number}" for number in range(len(functions)))
        return "\n".join((f"calls: {call} {more}", f"call: {alternatives}", *each, _RULES))

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _QwenXmlReader(self, functions)


def _is_string(schema: Any) -> bool:
    values = schema.get("enum", ()) if isinstance(schema, Mapping) and "type" not in schema else ()
    texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return texts or (isinstance(schema, Mapping) and schema.get("type") == "string")


def _properties(function: Function) -> Mapping[str, Any]:
    properties = function.schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"the properties of {function.name!r} are not an object", None, "tools")
    return properties


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rules(number: int, function: Function) -> str:
    """Return rule `call_NUMBER` and those of its parameters."""
    schema = function.schema
    shared = {name: schema[name] for name in _SHARED if name in schema}
    required, parameters, rules = schema.get("required"), [], []
    for index, (name, own) in enumerate(_properties(function).items()):
        value = "string"
        if _is_string(own) and isinstance(own.get("enum"), list):
            value = f"({' | '.join(map(_written, own['enum']))}) {json.dumps(_END)}"
        elif _is_string(own) and isinstance(own.get("pattern"), str):
            value = f"text_{number}_{index}"
            rules.append(_text_rules(value, own["pattern"]))
        elif not _is_string(own):
            value = f"value_{number}_{index} {json.dumps(_END)}"
            whole = {**own, **shared} if isinstance(own, Mapping) else own
            rules.append(f"value_{number}_{index}: %json {json.dumps(whole)}")
        rule = rf'({_written(f"<parameter={name}>")} "\n" {value} "\n")'
        parameters.append(rule if isinstance(required, list) and name in required else rule + "?")
    call = rf'call_{number}: "<function={function.name}>\n" {" ".join(parameters)} "</function>"'
    return "\n".join((call, *rules))


def _text_rules(name: str, pattern: str) -> str:
    """Return rule `name`: text up to the closing tag, with a match of a JSON schema's pattern anywhere."""
    bare, *anchors = unanchored(pattern)
    begin, end = ("" if anchored else "(?s:.*)" for anchored in anchors)
    escaped = re.sub(r"(?s)\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), bare)
    terminal = f"{name.upper()}: /{begin}(?:{escaped}){end}/ & STRING"
    return f"{name}[lazy]: {name.upper()} {json.dumps(_END)}\n{terminal}"


_IN_LARK = {"/": r"\/", "\n": r"\n"}


class _QwenXmlReader(JsonCallReader):
    """Reader that turns parameters into JSON: strings incrementally, other values as a whole."""

    def __init__(self, syntax: JsonCalls, functions: Sequence[Function]) -> None:
        self._strings = {
            function.name: {name for name, own in _properties(function).items() if _is_string(own)}
            for function in functions
        }
        super().__init__(syntax, frozenset(self._strings))

    def _read_calls(self) -> Reading[None]:
        yield from expect("<")
        yield from exactly("function=")
        name, seen = self._known((yield from until(">"))), set[str]()
        self._start(name)
        self._emit_arguments("{")
        while True:
            yield from expect("<")
            tag, _, parameter = (yield from until(">")).partition("=")
            if tag == "/function":
                break
            if tag != "parameter" or parameter in seen:
                raise ValueError
            yield from exactly("\n")
            self._emit_arguments(f"{', ' if seen else ''}{_written(parameter)}: ")
            seen.add(parameter)
            yield from self._read_value(parameter in self._strings[name])
        self._emit_arguments("}")
        yield from expect("<")
        yield from exactly(self._syntax.closing[1:])
        self._ended = True
        yield None

    def _read_value(self, is_string: bool) -> Reading[None]:
        if is_string:
            self._emit_arguments('"')
            yield _TextScanner(lambda text: self._emit_arguments(_written(text)[1:-1]))
            self._emit_arguments('"')
        else:
            pieces: list[str] = []
            yield _TextScanner(pieces.append)
            self._emit_arguments(_as_json("".join(pieces)))


def _as_json(text: str) -> str:
    """Return a value as JSON: it is JSON already, a literal of Python, or else text."""
    try:
        json.loads(text, parse_constant=int)
        return text.strip()
    except (ValueError, RecursionError):
        return {"True": "true", "False": "false", "None": "null"}.get(text) or json.dumps(
            text, ensure_ascii=False
        )


class _TextScanner(JsonScanner):
    """Incremental search for the tag that ends a parameter; passes on the text before it."""

    def __init__(self, take: Callable[[str], object]) -> None:
        self.done = self.broken = False
        self._take = take
        self._num_matched = 0  # characters of the tag; its first one does not occur again in it

    def push(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if not self._num_matched:
                begin = text.find(_END[0], at)
                self._take(text[at : begin if begin >= 0 else len(text)])
                at, self._num_matched = (begin + 1, 1) if begin >= 0 else (len(text), 0)
            elif text[at] == _END[self._num_matched]:
                at, self._num_matched = at + 1, self._num_matched + 1
                self.done = self._num_matched == len(_END)
            else:
                self._take(_END[: self._num_matched])
                self._num_matched = 0
        return at
