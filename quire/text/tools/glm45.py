"""The format of GLM-4.5 and later: the function's name, then tags for each key and each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, Reading, exactly, one_of, until
from quire.text.tools.tagged import TaggedCalls, TaggedReader

_KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"


class Glm45(TaggedCalls):
    """`<tool_call>NAME`, `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, `</tool_call>`.

    Up to GLM-4.6 each of them is on a line of its own.
    """

    name = "glm45"
    aliases: tuple[str, ...] = ("glm47",)
    marker = "<tool_call>"
    closing = "</tool_call>"
    value_end = "</arg_value>"
    tail = ""

    def __init__(self, source: str) -> None:
        self.after_value = "\n" if "</arg_key>\n" in source else ""
        self.head = f"{{name}}{self.after_value}"
        self.opening_tag = f"{_KEY}{{key}}{_KEY_END}{self.after_value}{_VALUE}"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, self.closing, _KEY, _KEY_END, _VALUE, self.value_end)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the tags of calls, keys and values."""
        return all(tag in source for tag in (cls.marker, _KEY, _VALUE))

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        each = f"call {mark(self.closing)}"
        return each, rf"/\n?/ {mark(self.marker)} {each}", ""

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _GlmReader(self, functions)


class _GlmReader(TaggedReader):
    def _read_calls(self) -> Reading[None]:
        name = yield from until("<")
        self._known(name.strip())
        tag = "<" + (yield from until(">")) + ">"
        if tag not in (_KEY, self._syntax.closing):
            raise ValueError
        self._begin_call(name)
        while tag == _KEY:
            key = yield from until("<")
            yield from exactly(_KEY_END[1:])
            yield from one_of(_VALUE)
            yield from self._read_parameter(key)
            tag = yield from one_of(_KEY, self._syntax.closing)
        self._emit_arguments("}")
        self._ended = True
        yield None
