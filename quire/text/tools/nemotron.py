"""The format of NVIDIA's Nemotron Nano 2 and Super: one JSON list between tags."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls


class NemotronJson(JsonCalls):
    """`<TOOLCALL>`, then `[{...}, {...}]</TOOLCALL>`."""

    name = "nemotron_json"
    marker = "<TOOLCALL>"
    opening, separator, closing = "[", ",", "]</TOOLCALL>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, "</TOOLCALL>")

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the tags around calls as a template writes them."""
        return "<TOOLCALL>[" in source and "]</TOOLCALL>" in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return '"[" call', '", " call', f'"]" {mark("</TOOLCALL>")}'
