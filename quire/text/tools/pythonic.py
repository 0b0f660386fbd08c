"""The formats of LFM2 and Llama whose calls are a list as in Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, JsonCalls, Reading, expect, one_of, until
from quire.text.tools.literals import LiteralReader, LiteralRules
from quire.text.tools.texts import ValueSchemas, literal

_QUOTED = r"""/'([^'\\\n]|\\['"\\\/bfnrt])*'/"""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class Pythonic(JsonCalls):
    """`[NAME(KEY="text", KEY=[1, 2]), NAME()]`, perhaps with marks around it, which a subclass defines."""

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules, of which `calls` is what follows the marker."""
        more = f'(", " call){{0,{self.max_calls - 1}}}' if several else ""
        rules, calls = [], []
        for number, function in enumerate(functions):
            values = _PythonRules(number, function, mark)
            members = values.parameters(lambda name: literal(f"{name}="), r'/[A-Za-z_]\w{0,127}/ "="')
            calls.append(f'{literal(f"{function.name}(")} {members} ")"')
            rules += values.rules
        calls_rule = f'calls: "[" call {more} "]" {self.end(mark)}'
        return "\n".join((calls_rule, f"call: {' | '.join(calls)}", *rules))

    def end(self, mark: Callable[[str], str]) -> str:
        """Return Lark for what follows the list."""
        return mark(self.closing)

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _PythonReader(self, frozenset(function.name for function in functions))


class Lfm2(Pythonic):
    """`[NAME(KEY="text", KEY=[1, 2]), NAME()]` between two marks."""

    name = "lfm2"
    marker = "<|tool_call_start|>"
    closing = "<|tool_call_end|>"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker, or for the one of older templates, which print no calls."""
        return cls.marker in source or "<|tool_list_start|>" in source


class LlamaPythonic(Pythonic):
    """`[NAME(KEY="text", KEY=[1, 2]), NAME()]`, and nothing before it; in Llama 4 perhaps between marks."""

    name = "pythonic"
    aliases: tuple[str, ...] = ("llama4_pythonic",)
    marker = "<|python_tag|>"
    bare = "["

    def __init__(self, source: str) -> None:
        if "<|header_start|>" in source:
            self.marker, self.closing = "<|python_start|>", "<|python_end|>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, *filter(None, (self.closing,)))

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the list that the template shows to the model."""
        return "[func_name1(" in source

    def end(self, mark: Callable[[str], str]) -> str:
        return f"({mark(self.closing)})?" if self.closing else ""


class _PythonRules(LiteralRules):
    """Values in Python's notation or JSON's; texts with constraints are in double quotes."""

    words: ClassVar[Mapping[str, str]] = {
        "true": '("True" | "true")',
        "false": '("False" | "false")',
        "null": '("None" | "null")',
    }
    any_key = r"""/"[^"\\\n]{1,128}": /"""

    def key(self, name: str) -> str:
        return literal(f"{literal(name)}: ")

    def text(self, text: str) -> str:
        plain = [literal(f"'{text}'")] if not set(text) & set("'\\\n") else []
        return f"({' | '.join((literal(literal(text)), *plain))})"

    def texts(self, name: str, found: ValueSchemas) -> str:
        parts = list[str]()
        for place, schema in enumerate(found.texts):
            if isinstance(schema.get("enum"), list):
                parts += map(self.text, schema["enum"])
                continue
            self.rules.append(f"{name}_text_{place}: %json {json.dumps(schema)}")
            parts += [f"{name}_text_{place}", *([_QUOTED] if schema == {"type": "string"} else ())]
        return " | ".join(parts)


class _PythonReader(LiteralReader):
    """Reader of calls in Python's notation.

    Templates print texts as they are: a quote in one ends it only before a character that may follow it.
    """

    quotes = "\"'"

    def _read_calls(self) -> Reading[None]:
        yield from expect("[")
        while True:
            self._whole = False
            self._start(self._known((yield from until("(")).strip()))
            yield from self._read_fields("=", ")")
            self._unparsed, self._whole = [], True
            if (yield from expect(",]")) == "]":
                break
        self._unparsed = []
        if self._syntax.closing:
            yield from one_of(self._syntax.closing)
        self._unparsed, self._ended = None, True
        yield None

    def _read_text(self, first: str) -> Reading[str]:
        self._emit_arguments('"')
        while True:
            char = yield None
            while char == first:
                space, char = "", (yield None)
                while char in " \t\r\n":
                    space, char = space + char, (yield None)
                if char in ",)]}:":
                    self._emit_arguments('"')
                    return char
                self._emit_text(first + space)
            self._emit_text((yield from self._read_escape()) if char == "\\" else char)

    def _read_escape(self) -> Reading[str]:
        char = yield None
        if char not in _DIGITS:
            return _ESCAPES.get(char, f"\\{char}")
        digits = ""
        for _ in range(_DIGITS[char]):
            digits += yield None
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            return f"\\{char}{digits}"

    def _emit_text(self, text: str) -> None:
        self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
