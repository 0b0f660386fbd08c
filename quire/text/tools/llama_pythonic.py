"""The format of Llama 3.2 and 4 with templates that ask for calls as in Python."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.pythonic import Pythonic


class LlamaPythonic(Pythonic):
    """`[NAME(KEY="text", KEY=[1, 2]), NAME()]`, and nothing before it; in Llama 4 perhaps between marks."""

    name = "pythonic"
    aliases: tuple[str, ...] = ("llama4_pythonic",)
    marker = "<|python_tag|>"
    bare = "["

    def __init__(self, source: str) -> None:
        if "<|header_start|>" in source:
            self.marker, self.closing = "<|python_start|>", "<|python_end|>"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, *filter(None, (self.closing,)))

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the list that the template shows to the model."""
        return "[func_name1(" in source

    def end(self, mark: Callable[[str], str]) -> str:
        return f"({mark(self.closing)})?" if self.closing else ""
