"""The format of Kimi K2: an id that names the function, and its JSON object, between marks."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, JsonCalls, Reading, exactly, one_of, until

BEGIN, END, ARGUED = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
ALL_END = "<|tool_calls_section_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(:[0-9]{1,6})?")


class KimiK2(JsonCalls):
    """`begin functions.NAME:NUMBER argument_begin {...} end` for each call.

    Templates print the id of a call and no name, so an id is what the model wrote.
    """

    name = "kimi_k2"
    marker = "<|tool_calls_section_begin|>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, BEGIN, ARGUED, END, ALL_END)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marks around all calls and before arguments."""
        return cls.marker in source and ARGUED in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        each = f"{mark(BEGIN)} call {mark(END)}"
        return each, each, mark(ALL_END)

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,4}}/ {mark(ARGUED)} args_{number}"

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _KimiReader(self, frozenset(function.name for function in functions))

    def new_id(self, name: str) -> str:
        """Make an id of the model's own form."""
        return f"functions.{name}:{1000 + secrets.randbelow(9000)}"


class _KimiReader(JsonCallReader):
    def _read_calls(self) -> Reading[None]:
        seen = set[str]()
        yield from one_of(BEGIN)
        while True:
            self._whole = False
            call_id = (yield from until("<")).strip()
            yield from exactly(ARGUED[1:])
            found = _ID.fullmatch(call_id)
            name = self._known(found[1] if found else "")
            own = call_id if found and found[2] and call_id not in seen else ""
            seen.add(call_id)
            yield from self._read_arguments(name, own)
            yield from one_of(END)
            if (yield from one_of(BEGIN, ALL_END)) == ALL_END:
                break
        self._unparsed, self._ended = None, True
        yield None
