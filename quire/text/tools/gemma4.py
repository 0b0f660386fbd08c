"""The format of Gemma 4: an object with bare names, whose texts are between marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import (
    JsonCallReader,
    JsonCalls,
    JsonScanner,
    Reading,
    exactly,
    one_of,
    until,
)
from quire.text.tools.literals import LiteralReader, LiteralRules, after_space
from quire.text.tools.tagged import TextScanner
from quire.text.tools.texts import End, ValueSchemas, literal, string_rules, text_rules

_QUOTE = '<|"|>'


class Gemma4(JsonCalls):
    """`call:NAME{KEY:<|"|>text<|"|>,KEY:[1,2]}` between marks, once for each call."""

    name = "gemma4"
    marker = "<|tool_call>"
    closing = "<tool_call|>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, self.closing, _QUOTE)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker with the word that follows it."""
        return f"{cls.marker}call:" in source

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules, of which `calls` is what follows the marker."""
        end = mark(self.closing)
        more = f"({mark(self.marker)} call {end}){{0,{self.max_calls - 1}}}" if several else ""
        rules, calls = [], []
        for number, function in enumerate(functions):
            values = _GemmaRules(number, function, mark)
            members = values.parameters(values.key, values.any_key)
            calls.append(f'{literal(f"call:{function.name}{{")} {members} "}}"')
            rules += values.rules
        rules.append(string_rules(End(_QUOTE, mark(_QUOTE))))
        return "\n".join((f"calls: call {end} {more}", f"call: {' | '.join(calls)}", *rules))

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _Gemma4Reader(self, frozenset(function.name for function in functions))


class _GemmaRules(LiteralRules):
    comma = ","
    words: ClassVar[Mapping[str, str]] = {"true": '"true"', "false": '"false"', "null": '("null" | "None")'}
    any_key = r'/[^\s:{}\[\],<"]{1,128}:/'

    def key(self, name: str) -> str:
        return literal(f"{name}:")

    def order(self, names: Sequence[str]) -> Sequence[str]:
        return sorted(names, key=str.lower)  # as templates do

    def text(self, text: str) -> str:
        return f"({self._mark(_QUOTE)} {literal(text)} {self._mark(_QUOTE)})"

    def texts(self, name: str, found: ValueSchemas) -> str:
        quote = self._mark(_QUOTE)
        if found.texts == ({"type": "string"},):
            return f"{quote} string"
        self.rules += text_rules(f"{name}_text", ValueSchemas(found.texts, ()), End(_QUOTE, quote))
        return f"{quote} {name}_text"


class _Gemma4Reader(LiteralReader):
    quotes = '<"'

    def _read_calls(self) -> Reading[None]:
        yield from one_of("call:")
        self._start(self._known((yield from until("{")).strip()))
        yield from self._read_fields(":", "}")
        self._unparsed, self._whole = [], True
        yield from one_of(self._syntax.closing)
        self._unparsed, self._ended = None, True
        yield None

    def _read_text(self, first: str) -> Reading[str]:
        if first == '"':
            yield JsonScanner('"', self._emit_arguments)
        else:
            yield from exactly(_QUOTE[1:])
            self._emit_arguments('"')
            yield TextScanner(_QUOTE, lambda text: self._emit_arguments(literal(text)[1:-1]))
            self._emit_arguments('"')
        return (yield from after_space())
