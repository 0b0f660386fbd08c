"""The format of Mistral's models with older tokenizers: one JSON list after one marker."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls


class Mistral(JsonCalls):
    """`[TOOL_CALLS]`, then `[{...}, {...}]`."""

    name = "mistral"
    marker = "[TOOL_CALLS]"
    opening, separator, closing = "[", ",", "]"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker,)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Exclude newer models, which write name[ARGS]{...} after the same marker (see MistralArgs)."""
        return cls.marker in source and "[ARGS]" not in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return r"/ ?\[/ call", '", " call', '"]"'

    def new_id(self, name: str) -> str:
        """Make an id of nine letters and digits: the templates refuse any other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
