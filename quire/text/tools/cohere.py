"""The formats of Cohere's Command models: a JSON list of calls with a name and parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCalls

_SPACE = r"[ \n]{0,24}"


class CohereCommand(JsonCalls):
    """The list of Command R7B and Command A, between START_ACTION and END_ACTION; calls have numbers."""

    name = "cohere_command3"
    aliases: tuple[str, ...] = ("cohere_command4",)
    marker = "<|START_ACTION|>"
    opening, separator, closing = "[", ",", "]<|END_ACTION|>"
    name_key, arguments_key = "tool_name", "parameters"

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, "<|END_ACTION|>")

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker and the key of names."""
        return cls.marker in source and '"tool_name"' in source

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return r"/\[\n?    /" + " call", r"/,\n?    /" + " call", rf"/\n?\]/ {mark('<|END_ACTION|>')}"

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        whole = super().call(number, name, mark)
        return whole.replace(r'"{\"', r'"{\"tool_call_id\": \"" /[0-9]{1,4}/ "\", \"', 1)


class CommandR(JsonCalls):
    """The indented list of Command R, in a block of JSON after the word Action."""

    name = "command_r"
    marker = "Action:\n```json"
    opening, separator, closing = "[", ",", "]```"
    name_key, arguments_key = "tool_name", "parameters"

    @property
    def tokens(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker as a template writes it, and the key of names."""
        return json.dumps(cls.marker)[1:-1] in source and "tool_name" in source

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules, for arguments with any white space."""
        spaced = {"x-guidance": {"whitespace_pattern": _SPACE}}
        wide = [function._replace(schema={**function.schema, **spaced}) for function in functions]
        return "\n".join((super().grammar(wide, several, mark), f"space: /{_SPACE}/"))

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        return 'space "[" space call', '"," space call', 'space "]```"'

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        head = json.dumps(f'"tool_name": "{name}",')
        return rf'"{{" space {head} space "\"parameters\": " args_{number} space "}}"'
