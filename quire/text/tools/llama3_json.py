"""The format of Llama 3.1 and later: the answer is a JSON object, perhaps after <|python_tag|>."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.json_calls import JsonCalls


class Llama3Json(JsonCalls):
    """`{"name": ..., "parameters": {...}}`, and nothing before it."""

    name = "llama3_json"
    aliases: tuple[str, ...] = ("llama4_json",)
    marker = "<|python_tag|>"
    bare = "{"
    separator = ";"
    arguments_key = "parameters"

    def __init__(self, source: str) -> None:
        if "only supports single tool-calls" in source:
            self.max_calls = 1  # with more, the template refuses the next turn of the conversation

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the text that the template prints around a call."""
        return """'{"name": "'""" in source and """'"parameters": '""" in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return "call", '"; " call', ""
