"""The formats of Phi-4-mini: JSON between marks, or a list after the word functools."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls

_CALLED = "<|/tool_call|>"


class Phi4Mini(JsonCalls):
    """`<|tool_call|>[{...}, {...}]<|/tool_call|>`, or each object between marks of its own."""

    name = "phi4_mini"
    marker = "<|tool_call|>"
    opening, separator, closing = "[", ",", f"]{_CALLED}"

    def __init__(self, source: str) -> None:
        if self.marker in source and f"{self.marker}[" not in source:
            self.opening, self.separator, self.closing = "", "", _CALLED

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, _CALLED)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for both marks: the model's own template has neither, and shows it no tools."""
        return cls.marker in source and _CALLED in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        end = mark(_CALLED)
        if not self.opening:
            return f"call {end}", f"{mark(self.marker)} call {end}", ""
        return '"[" call', '", " call', f'"]" {end}'


class Phi4Functools(JsonCalls):
    """`functools[{...}, {...}]`."""

    name = "phi4_mini_json"
    marker = "functools["
    separator, closing = ",", "]"

    @property
    def tokens(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the word before a list."""
        return cls.marker in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return "call", '", " call', '"]"'
