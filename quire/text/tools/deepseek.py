"""The formats of DeepSeek V3, R1 and V3.1: marks around a name and its JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, JsonCalls, Reading, exactly, one_of, until

BEGIN, END, NAMED = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL_END = "<｜tool▁calls▁end｜>"


class DeepSeekV31(JsonCalls):
    """After the marker, `begin NAME sep {...} end` for each call, then a mark for the end of all."""

    name = "deepseek_v31"
    marker = "<｜tool▁calls▁begin｜>"
    between = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, BEGIN, NAMED, END, ALL_END)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Exclude older models, which put the arguments into a block of code (see DeepSeekV3)."""
        return cls.marker in source and "```json" not in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        each = f"{mark(BEGIN)} call {mark(END)}"
        return each, f"{json.dumps(self.between)} {each}" if self.between else each, mark(ALL_END)

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        return f"{json.dumps(name)} {mark(NAMED)} args_{number}"

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _DeepSeekReader(self, frozenset(function.name for function in functions))


class DeepSeekV3(DeepSeekV31):
    """After the marker, `begin function sep NAME`, a block of JSON and `end`, one call a line."""

    name = "deepseek_v3"
    between = "\n"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the block of JSON that newer models do without."""
        return cls.marker in source and "```json" in source

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        head = json.dumps(f"{name}\n```json\n")
        return rf'"function" {mark(NAMED)} {head} args_{number} "\n```"'


class _DeepSeekReader(JsonCallReader):
    """Reader of both formats."""

    def _read_calls(self) -> Reading[None]:
        yield from one_of(BEGIN)
        while True:
            self._whole = False
            name = (yield from until("<")).strip()
            yield from exactly(NAMED[1:])
            if in_block := isinstance(self._syntax, DeepSeekV3):
                name = (yield from until("\n")).strip()
                yield from one_of("```json")
            yield from self._read_arguments(self._known(name))
            if in_block:
                yield from one_of("```")
            yield from one_of(END)
            if (yield from one_of(BEGIN, ALL_END)) == ALL_END:
                break
        self._unparsed, self._ended = None, True
        yield None
