"""The formats of Hunyuan: a JSON list between tags, or a block of JSON for each call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, JsonCalls, Reading, one_of, until

_CALL, _CALLED = "<tool_call>", "</tool_call>"


class HunyuanA13B(JsonCalls):
    """`<tool_calls>`, then `[{...}, {...}]</tool_calls>`."""

    name = "hunyuan_a13b"
    marker = "<tool_calls>"
    opening, separator, closing = "[", ",", "]</tool_calls>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, "</tool_calls>")

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker before a list."""
        return f"{cls.marker}[" in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return '"[" call', '", " call', f'"]" {mark("</tool_calls>")}'


class Hunyuan(JsonCalls):
    """Of the dense models: `<tool_call>NAME`, a block of JSON and `</tool_call>`, one call a line."""

    name = "hunyuan"
    marker = "<tool_calls>"
    closing = "</tool_calls>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, _CALL, _CALLED, self.closing)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marks around all calls and around each, and for the block of JSON."""
        return all(mark in source for mark in (cls.marker, _CALL, "```json"))

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        each = f"{mark(_CALL)} call {mark(_CALLED)}"
        return rf"/\n?/ {each}", rf'"\n" {each}', rf"/\n?/ {mark(self.closing)}"

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        head = json.dumps(f"{name}\n```json\n")
        return rf'{head} args_{number} "\n```"'

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _HunyuanReader(self, frozenset(function.name for function in functions))


class _HunyuanReader(JsonCallReader):
    def _read_calls(self) -> Reading[None]:
        yield from one_of(_CALL)
        while True:
            self._whole = False
            name = self._known((yield from until("\n")).strip())
            yield from one_of("```json")
            yield from self._read_arguments(name)
            yield from one_of("```")
            yield from one_of(_CALLED)
            if (yield from one_of(_CALL, self._syntax.closing)) == self._syntax.closing:
                break
        self._unparsed, self._ended = None, True
        yield None
