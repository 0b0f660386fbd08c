"""The format of MiniMax M2: tags that invoke a function, in a block of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, Reading, one_of, until
from quire.text.tools.tagged import TaggedCalls, TaggedReader

_INVOKE, _PARAMETER, _INVOKED = "<invoke name=", "<parameter name=", "</invoke>"


class MiniMaxM2(TaggedCalls):
    """`<invoke name="NAME">`, `<parameter name="KEY">VALUE</parameter>` and `</invoke>` for each call."""

    name = "minimax_m2"
    marker = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    head, tail = '<invoke name="{name}">\n', "</invoke>\n"
    opening_tag, value_end, after_value = '<parameter name="{key}">', "</parameter>", "\n"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the tags around calls and of a function."""
        return cls.marker in source and _INVOKE in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return r'"\n" call', "call", mark(self.closing)

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _MiniMaxReader(self, functions)


class _MiniMaxReader(TaggedReader):
    def _read_calls(self) -> Reading[None]:
        yield from one_of(_INVOKE)
        while True:
            self._whole = False
            self._begin_call((yield from until(">")).strip('"'))
            while (yield from one_of(_PARAMETER, _INVOKED)) == _PARAMETER:
                yield from self._read_parameter((yield from until(">")).strip('"'))
            self._end_call()
            if (yield from one_of(_INVOKE, self._syntax.closing)) == self._syntax.closing:
                break
        self._unparsed, self._ended = None, True
        yield None
