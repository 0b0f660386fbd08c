"""The format of Mistral's models with newer tokenizers: a name and its arguments after each marker."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, Reading, expect, until
from quire.text.tools.mistral import Mistral

NAMED, ARGUED = "[CALL_ID]", "[ARGS]"


class MistralArgs(Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}` for each call. Some models write `name[CALL_ID]id[ARGS]{...}`."""

    name = "mistral_args"
    aliases: tuple[str, ...] = ("mistral",)

    def __init__(self, source: str) -> None:
        self._with_id = NAMED in source

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, NAMED, ARGUED)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Exclude older models, which write a JSON list after the same marker."""
        return cls.marker in source and ARGUED in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return "call", f"{mark(self.marker)} call", ""

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        call_id = f"{mark(NAMED)} /[a-zA-Z0-9]{{9}}/ " if self._with_id else ""
        return f"{json.dumps(name)} {call_id}{mark(ARGUED)} args_{number}"

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _MistralArgsReader(self, frozenset(function.name for function in functions))


class _MistralArgsReader(JsonCallReader):
    def _read_calls(self) -> Reading[None]:
        while True:
            name = self._known((yield from until("[")).strip())
            mark = yield from until("]")
            if f"[{mark}]" == NAMED:
                yield from until("[")
                mark = yield from until("]")
            if f"[{mark}]" != ARGUED:
                raise ValueError
            yield from self._read_arguments(name)
            yield from expect("[")
            self._whole = False
            if f"[{yield from until(']')}]" != self.marker:
                raise ValueError
