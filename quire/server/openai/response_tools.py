"""Tools of /v1/responses: what the model may call, and as what items its calls go back to the client.

The model is told of functions alone. A tool that takes free text is a function of one parameter, `input`; a
namespace's functions bear its name before their own. `Toolbox` knows which function stands for which tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.errors import RequestError
from quire.grammar.lark_regex import NotRegular, as_regex
from quire.text.tools.functions import MAX_FUNCTIONS, unanchored

Name = Annotated[str, Meta(max_length=256)]
FUNCTION, CUSTOM, SEARCH, SHELL = "function", "custom", "tool_search", "local_shell"
FUNCTION_PLACE = r"^tools\[(\d+)\](\.function\.parameters)?"  # for Toolbox.place
# What only OpenAI's servers run, by the beginning of its type.
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer"),
    "programmatic_tool_calling",
)
MAX_WARNINGS = 16
MAX_GRAMMARS = 1 << 18  # characters of all grammars of a request that are enforced
_RUN_BY_CLIENT = "this server runs no tools: give functions, and run them yourself"
_COMMAND = {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."}
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": _COMMAND,
        "working_directory": {"type": "string", "description": "Where to run the command."},
        "timeout_ms": {"type": "integer", "description": "After how many milliseconds to end it."},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class CustomFormat(Struct, kw_only=True, omit_defaults=True):
    """Form of a custom tool's text: `type` is text or grammar, `syntax` lark or regex."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Tool(Struct, kw_only=True, omit_defaults=True):
    """A function, a custom tool, a namespace of both, or a tool that the interface itself defines."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[Tool] | None = None
    execution: str | None = None


class FunctionCall(Struct, tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCall(Struct, tag="custom_tool_call"):
    """A call of a custom tool, with its text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ToolSearchCall(Struct, tag="tool_search_call"):
    """A search among the tools that the client has not told of yet."""

    id: str
    status: str
    call_id: str
    arguments: dict[str, Any]
    execution: str = "client"


class LocalShellCall(Struct, tag="local_shell_call"):
    """A command that the client is to run."""

    id: str
    status: str
    call_id: str
    action: dict[str, Any]


CallItem = FunctionCall | CustomToolCall | ToolSearchCall | LocalShellCall


class Called(NamedTuple):
    """The tool that a function stands for."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The name by which the model calls it."""
        return f"{self.namespace}.{self.name}" if self.namespace else self.name

    def item(self, item_id: str, status: str, call_id: str, arguments: str) -> CallItem:
        """A call of it, as far as its arguments have come."""
        namespace = self.namespace or UNSET
        if self.kind == CUSTOM:
            text = CustomInput().push(arguments)
            return CustomToolCall(item_id, status, call_id, self.name, text, namespace)
        if self.kind == SEARCH:
            return ToolSearchCall(item_id, status, call_id, _object(arguments))
        if self.kind == SHELL:
            action = {"type": "exec", "command": [], "env": {}, **_object(arguments)}
            return LocalShellCall(item_id, status, call_id, action)
        return FunctionCall(item_id, status, call_id, self.name, arguments, namespace)


class Toolbox:
    """The tools of a request, by the names of their functions.

    `functions` are in the form that chat templates read, `places` say where the request gave each of them.
    """

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.warnings: list[str] = []
        self._called: dict[str, Called] = {}
        self._numbers: dict[str, int] = {}  # where a function stands in the list
        self._room = MAX_GRAMMARS

    def called(self, function: str) -> Called:
        """The tool that a function stands for."""
        return self._called.get(function, Called(FUNCTION, function))

    def place(self, match: re.Match[str]) -> str:
        """Return the place in the request of a function that an error names: tools[3].function.parameters."""
        number, parameters = int(match[1]), match[2]
        is_text = self.called(self.functions[number]["function"]["name"]).kind == CUSTOM
        return self.places[number] + (".format" if parameters and is_text else parameters or "")

    def warn(self, warning: str) -> None:
        """Say something once; of very many things, the first."""
        if warning not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)

    def add(self, tools: Iterable[Tool], where: str, *, again: bool = False) -> list[str]:
        """Take tools in and return the names of their functions. Raises RequestError for what is none.

        With `again`, one that is there already is replaced: conversations tell of tools more than once.
        """
        names = []
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            if tool.type == "namespace":
                names += self._add_namespace(tool, place, again)
            elif tool.type.startswith(_HOSTED) or (tool.type == SEARCH and tool.execution != "client"):
                self.warn(
                    f"tools of type {tool.type[:64]!r} are not offered to the model: this server runs none"
                )
            else:
                names.append(self._add_one(tool, place, again, None))
        return names

    def choice(self, choice: str | dict[str, Any] | None) -> Any:
        """A request's `tool_choice` as chat completions have it."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            entries = tools if isinstance(tools, list) else []
            names = [name for entry in entries for name in self._chosen(entry)]
            allowed = {"mode": choice.get("mode"), "tools": [{"function": {"name": name}} for name in names]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        if not (names := self._chosen(choice)) or choice.get("type") == "namespace":
            hint = 'one of "none", "auto", "required", {"type": "function", "name": ...}'
            raise RequestError("tool_choice of this type is not supported", hint, "tool_choice")
        return {"name": names[0]}

    def _chosen(self, entry: Any) -> list[Any]:
        """The functions that an entry of a choice names; none, if it is a tool that was not offered."""
        if not isinstance(entry, Mapping):
            return [None]
        kind, name, namespace = (entry.get(key) for key in ("type", "name", "namespace"))
        if kind in (FUNCTION, CUSTOM):
            return [f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name]
        if kind == "namespace":
            return [function for function, called in self._called.items() if called.namespace == name]
        return [function for function, called in self._called.items() if called.kind == kind]

    def _add_namespace(self, tool: Tool, where: str, again: bool) -> list[str]:
        if not tool.name:
            raise RequestError(f"{where} lacks its name", None, where)
        names = []
        for index, inner in enumerate(tool.tools or ()):
            if inner.type not in (FUNCTION, CUSTOM):
                problem = f"{where}.tools[{index}]: {inner.type[:64]!r} is no type of a tool in a namespace"
                raise RequestError(problem, "give functions and custom tools", f"{where}.tools[{index}]")
            names.append(self._add_one(inner, f"{where}.tools[{index}]", again, tool.name))
        if names and tool.description:  # told once, with its first function
            function = self.functions[self._numbers[names[0]]]["function"]
            own = function.get("description")
            function["description"] = f"{tool.description}\n\n{own}" if own else tool.description
        return names

    def _add_one(self, tool: Tool, where: str, again: bool, namespace: str | None) -> str:
        if tool.type in (SEARCH, SHELL):
            called = Called(tool.type, tool.type)
        elif tool.type not in (FUNCTION, CUSTOM):
            problem = f"{where}: a tool of type {tool.type[:64]!r} is not supported"
            raise RequestError(problem, _RUN_BY_CLIENT, where)
        elif tool.name is None:
            raise RequestError(f"{where} lacks its name", None, where)
        else:
            called = Called(tool.type, tool.name, namespace)
        name = called.function
        function = {"type": "function", "function": {"name": name, **self._told(tool, where)}}
        number = self._numbers.setdefault(name, len(self.functions))
        if number == len(self.functions):
            if number == MAX_FUNCTIONS:
                raise RequestError(f"there are more than {MAX_FUNCTIONS} tools", None, "tools")
            self.functions.append(function)
            self.places.append(where)
        elif again:
            self.functions[number], self.places[number] = function, where
        else:
            raise RequestError(f"{where}.name {name[:64]!r} is there twice", None, f"{where}.name")
        self._called[name] = called
        return name

    def _told(self, tool: Tool, where: str) -> dict[str, Any]:
        """Return the description and the parameters of a tool as the model sees them."""
        if tool.type == SHELL:
            return {"description": "Runs a command on the user's machine.", "parameters": _SHELL_PARAMETERS}
        if tool.type == CUSTOM:
            return self._told_of_text(tool, where)
        fields = ("description", "parameters", "strict")
        return {name: value for name in fields if (value := getattr(tool, name)) is not None}

    def _told_of_text(self, tool: Tool, where: str) -> dict[str, Any]:
        form = tool.format or CustomFormat(type="text")
        text: dict[str, Any] = {"type": "string", "description": "The input of the tool, as it is."}
        description = tool.description or ""
        if form.type == "grammar" and form.syntax in ("lark", "regex") and form.definition:
            description += f"\n\nIts input follows this grammar ({form.syntax}):\n{form.definition}"
            try:
                text["pattern"] = f"^(?:{self._expression(form.syntax, form.definition)})$"
            except NotRegular as error:
                self.warn(
                    f"{where}.format describes the input to the model, and does not enforce it: {error}"
                )
        elif form.type != "text":
            problem = f"{where}.format is not supported"
            hint = 'give {"type": "text"}, or "grammar" with syntax "lark" or "regex" and its definition'
            raise RequestError(problem, hint, f"{where}.format")
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"description": description.strip(), "parameters": schema | {"additionalProperties": False}}

    def _expression(self, syntax: str, definition: str) -> str:
        """A grammar as a regular expression. Raises NotRegular."""
        self._room -= len(definition)
        if self._room < 0:
            raise NotRegular(f"the request's grammars have more than {MAX_GRAMMARS} characters")
        return as_regex(definition) if syntax == "lark" else unanchored(definition)[0]


class CustomInput:
    """Reads the text of a custom tool out of {"input": "..."}, which comes in pieces of any size."""

    def __init__(self) -> None:
        self._held = ""  # of the JSON text: what is not read yet
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """The text in this piece and in what was held back before it."""
        self._held += arguments
        if not self._begun:
            if (opening := _OPENING.match(self._held)) is None:
                return ""
            self._begun, self._held = True, self._held[opening.end() :]
        if self._ended or (read := _CHARACTERS.match(self._held)) is None:
            return ""
        self._held = self._held[read.end() :]
        self._ended = self._held.startswith('"')
        return _SURROGATE.sub("\ufffd", json.loads(f'"{read[0]}"', strict=False))


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters. What begins like the first half of a pair waits for what follows it.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}
     (?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..)))+""",
    re.VERBOSE,
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; an empty one where the answer was cut within them."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
