"""The format of Granite 3: a JSON list after a marker."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls


class Granite(JsonCalls):
    """`<|tool_call|>`, then `[{...}, {...}]`."""

    name = "granite"
    marker = "<|tool_call|>"
    opening, separator, closing = "[", ",", "]"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker,)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the model's mark of roles, too, as other models have the same marker."""
        return cls.marker in source and "<|start_of_role|>" in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return '"[" call', '", " call', '"]"'
