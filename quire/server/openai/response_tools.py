"""Tools of /v1/responses: the functions that represent them to the model, and the items of their calls.

The model sees functions only. A tool that takes free text becomes a function with one parameter, `input`; the
functions of a namespace get its name as a prefix. `Toolbox` maps functions back to tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from quire.errors import RequestError
from quire.grammar.lark_regex import NotRegular, as_regex
from quire.text.tools.functions import MAX_FUNCTIONS, unanchored

Name = Annotated[str, Meta(max_length=256)]
FUNCTION, CUSTOM, SEARCH, SHELL = "function", "custom", "tool_search", "local_shell"
ID_PREFIXES = {FUNCTION: "fc", CUSTOM: "ctc", SEARCH: "tsc", SHELL: "lsh"}
# Prefixes of the types of tools that only OpenAI's servers run.
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer"),
    "programmatic_tool_calling",
)
MAX_WARNINGS = 16
MAX_GRAMMARS = 1 << 18  # characters of all grammars of a request that are enforced
_COMMAND = {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."}
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": _COMMAND,
        "working_directory": {"type": "string", "description": "The directory to run it in."},
        "timeout_ms": {"type": "integer", "description": "Timeout in milliseconds."},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class CustomFormat(Struct, kw_only=True, omit_defaults=True):
    """Format of a custom tool's input: `type` is text or grammar, `syntax` is lark or regex."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(Struct, kw_only=True, omit_defaults=True):
    """A function, a custom tool, a namespace of both, or a tool that the API itself defines."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponsesTool] | None = None
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
    """A call of a custom tool, with its input text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ToolSearchCall(Struct, tag="tool_search_call"):
    """A search among tools that the client has not sent yet."""

    id: str
    status: str
    call_id: str
    arguments: dict[str, Any]
    execution: str = "client"


class LocalShellCall(Struct, tag="local_shell_call"):
    """A command for the client to run."""

    id: str
    status: str
    call_id: str
    action: dict[str, Any]


CallItem = FunctionCall | CustomToolCall | ToolSearchCall | LocalShellCall


def function_name(name: str, namespace: Any) -> str:
    """Return the name by which the model calls a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class CalledTool(NamedTuple):
    """A tool that a function represents: `definition` is the function, `place` its place in the request."""

    kind: str
    name: str
    namespace: str | None = None
    definition: Mapping[str, Any] = {}
    place: str = ""

    def item(self, item_id: str, status: str, call_id: str, arguments: str) -> CallItem:
        """Return the item of a call with the arguments that have arrived so far."""
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
    """The tools of a request by the names of their functions, and warnings about those left out."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._tools: dict[str, CalledTool] = {}
        self._grammar_characters = 0

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Return the functions in the form that chat templates read."""
        return [{"type": "function", "function": tool.definition} for tool in self._tools.values()]

    def called(self, function: str) -> CalledTool:
        """Return the tool that a function represents."""
        return self._tools.get(function) or CalledTool(FUNCTION, function)

    @property
    def names(self) -> dict[str, Callable[[re.Match[str]], str]]:
        """Return the names of functions' fields in errors, for `renaming_fields`."""
        return {r"^tools\[(\d+)\](\.function\.parameters)?": self._place}

    def _place(self, match: re.Match[str]) -> str:
        tool, parameters = [*self._tools.values()][int(match[1])], match[2]
        return tool.place + (".format" if parameters and tool.kind == CUSTOM else parameters or "")

    def warn(self, warning: str) -> None:
        """Add a warning once, up to MAX_WARNINGS."""
        if warning not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)

    def add(self, tools: Iterable[ResponsesTool], where: str, *, again: bool = False) -> list[str]:
        """Add tools and return the names of their functions. Raises RequestError for an invalid one.

        With `again`, a tool replaces an earlier one of its name: conversations may bring tools repeatedly.
        """
        names = []
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            if tool.type == "namespace":
                names += self._add_namespace(tool, place, again)
            elif tool.type.startswith(_HOSTED) or (tool.type == SEARCH and tool.execution != "client"):
                self.warn(f"tools of type {tool.type[:64]!r} are left out: this server runs no tools")
            else:
                names.append(self._add_one(tool, place, again))
        return names

    def choice(self, choice: str | dict[str, Any] | None) -> Any:
        """Return a request's `tool_choice` in the form of chat completions."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            chosen = map(self._chosen, tools if isinstance(tools, list) else ())
            allowed = [{"function": {"name": name}} for names in chosen for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
        if not (names := self._chosen(choice)) or choice.get("type") == "namespace":
            hint = 'one of "none", "auto", "required", {"type": "function", "name": ...}'
            raise RequestError("tool_choice of this type is not supported", hint, "tool_choice")
        return {"name": names[0]}

    def _chosen(self, choice: Any) -> list[Any]:
        """Return the functions that a choice names; none for a tool that was left out."""
        if not isinstance(choice, Mapping):
            return [None]
        kind, name, namespace = (choice.get(key) for key in ("type", "name", "namespace"))
        if kind in (FUNCTION, CUSTOM):
            return [function_name(name, namespace) if isinstance(name, str) else name]
        tools = self._tools.items()
        if kind == "namespace":
            return [function for function, tool in tools if tool.namespace == name]
        return [function for function, tool in tools if tool.kind == kind]

    def _add_namespace(self, tool: ResponsesTool, where: str, again: bool) -> list[str]:
        if not tool.name:
            raise RequestError(f"{where}: name is missing", None, where)
        names = []
        for index, inner in enumerate(tool.tools or ()):
            place = f"{where}.tools[{index}]"
            if inner.type not in (FUNCTION, CUSTOM):
                problem = f"{place}: a namespace cannot hold a tool of type {inner.type[:64]!r}"
                raise RequestError(problem, "give functions and custom tools", place)
            if index == 0 and tool.description:  # goes to the model once, with the first function
                description = "\n\n".join(filter(None, (tool.description, inner.description)))
                inner = replace(inner, description=description)
            names.append(self._add_one(inner, place, again, tool.name))
        return names

    def _add_one(self, tool: ResponsesTool, where: str, again: bool, namespace: str | None = None) -> str:
        name = tool.type if tool.type in (SEARCH, SHELL) else tool.name
        if tool.type not in (FUNCTION, CUSTOM, SEARCH, SHELL):
            problem = f"{where}: a tool of type {tool.type[:64]!r} is not supported"
            raise RequestError(
                problem, "this server runs no tools: give functions, and run them yourself", where
            )
        if name is None:
            raise RequestError(f"{where}: name is missing", None, where)
        function = function_name(name, namespace)
        definition = {"name": function, **self._definition(tool, where)}
        if function in self._tools and not again:
            raise RequestError(f"{where}.name {function[:64]!r} is used twice", None, f"{where}.name")
        if function not in self._tools and len(self._tools) == MAX_FUNCTIONS:
            raise RequestError(f"there are more than {MAX_FUNCTIONS} tools", None, "tools")
        self._tools[function] = CalledTool(tool.type, name, namespace, definition, where)
        return function

    def _definition(self, tool: ResponsesTool, where: str) -> dict[str, Any]:
        """Return the description and the parameters of a tool as the model sees them."""
        if tool.type == SHELL:
            return {"description": "Runs a command on the user's machine.", "parameters": _SHELL_PARAMETERS}
        if tool.type != CUSTOM:
            fields = ("description", "parameters", "strict")
            return {name: value for name in fields if (value := getattr(tool, name)) is not None}
        form = tool.format or CustomFormat(type="text")
        text: dict[str, Any] = {"type": "string", "description": "The input of the tool, verbatim."}
        description = tool.description or ""
        if form.type == "grammar" and form.syntax in ("lark", "regex") and form.definition:
            description += f"\n\nIts input follows this grammar ({form.syntax}):\n{form.definition}"
            try:
                text["pattern"] = f"^(?:{self._expression(form.syntax, form.definition)})$"
            except NotRegular as error:
                self.warn(f"{where}.format is shown to the model, but not enforced: {error}")
        elif form.type != "text":
            hint = 'give {"type": "text"}, or "grammar" with syntax "lark" or "regex" and its definition'
            raise RequestError(f"{where}.format is not supported", hint, f"{where}.format")
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"description": description.strip(), "parameters": schema | {"additionalProperties": False}}

    def _expression(self, syntax: str, definition: str) -> str:
        """Return a grammar as a regular expression. Raises NotRegular."""
        self._grammar_characters += len(definition)
        if self._grammar_characters > MAX_GRAMMARS:
            raise NotRegular(f"the request's grammars have more than {MAX_GRAMMARS} characters")
        return as_regex(definition) if syntax == "lark" else unanchored(definition)[0]


class CustomInput:
    """Decodes the text of a custom tool from {"input": "..."}, which arrives in pieces of any size."""

    def __init__(self) -> None:
        self._held = ""  # the end of the JSON text, not decoded yet
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """Return the text that can be decoded with this piece."""
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
# Whole characters. The first half of a surrogate pair waits for the second.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}
     (?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..)))+""",
    re.VERBOSE,
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _object(arguments: str) -> dict[str, Any]:
    """Parse arguments, whose decimals keep their digits, and half characters are replaced.

    They are an empty object where the token limit ended the answer within them.
    """
    try:
        found = _whole(json.loads(arguments, parse_float=lambda digits: Raw(digits.encode())))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: Any) -> Any:
    """Replace half characters in a JSON value: they cannot be sent."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_whole(name): _whole(inner) for name, inner in value.items()}
    return [*map(_whole, value)] if isinstance(value, list) else value
