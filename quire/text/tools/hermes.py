"""The format of Hermes, Qwen, Ernie and Quire's demo model: one JSON object in each pair of tags."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls


class Hermes(JsonCalls):
    """`<tool_call>`, a line with the object, `</tool_call>`."""

    name = "hermes"
    aliases: tuple[str, ...] = ("ernie45", "granite4", "qwen3_json")
    marker = "<tool_call>"
    closing = "</tool_call>"

    def __init__(self, source: str) -> None:
        # Hermes 2 was trained to write the arguments before the name.
        self.arguments_first = re.search(r'\{\s*\\?"arguments', source) is not None

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for a key, too, that formats with the same tags around XML do not have."""
        return cls.marker in source and re.search(r'"arguments\\?"', source) is not None

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        first = rf'"\n" call "\n" {mark(self.closing)}'
        return first, rf'"\n" {mark(self.marker)} {first}', ""
