"""The functions that a request offers to the model, and which of them may or must be called."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.grammar.json_schema import tighten_formats
from quire.text.tools.loosen import OPEN, loosened, looser

MAX_FUNCTIONS = 512
MAX_WARNINGS = 16  # in one response
WIDENING_S = 5.0  # for all schemas of a request that do not compile
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Function(NamedTuple):
    """A function: its name, the schema of its arguments for llguidance, and warnings of what that omits."""

    name: str
    schema: dict[str, Any]
    strict: bool = False
    warnings: tuple[str, ...] = ()


def read_functions(tools: Sequence[Mapping[str, Any] | Function] | None) -> tuple[Function, ...]:
    """Parse the functions of a request's `tools`; entries that are parsed already are kept.

    Raises RequestError that names the malformed entry.
    """
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise RequestError("tools is not a list", 'give [{"type": "function", ...}]', "tools")
    if tools and len(tools) > MAX_FUNCTIONS:
        raise RequestError(f"{len(tools)} tools are more than {MAX_FUNCTIONS}", None, "tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools or ()):
        function = tool if isinstance(tool, Function) else _read_function(tool, f"tools[{index}]")
        if function.name in functions:
            raise _wrong(f"tools[{index}].function.name", f"{function.name!r} is defined twice")
        functions[function.name] = function
    return tuple(functions.values())


def choose(functions: Sequence[Function], tool_choice: Any) -> tuple[tuple[Function, ...], bool]:
    """Return the functions that may be called by `tool_choice`, and True if one must be."""
    if tool_choice in (None, "auto", "none"):
        return (() if tool_choice == "none" else tuple(functions)), False
    if not functions:
        raise RequestError("tool_choice needs tools", "give tools, or leave tool_choice out", "tool_choice")
    if tool_choice == "required":
        return tuple(functions), True
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        return _allowed(functions, tool_choice.get("allowed_tools"))
    return (_named(functions, tool_choice),), True


def _named(functions: Sequence[Function], choice: Any) -> Function:
    """Return the function that a choice names, in the form of either of OpenAI's APIs."""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        hint = 'one of "none", "auto", "required", {"type": "function", "function": {"name": ...}}'
        raise RequestError("tool_choice has an unknown form", hint, "tool_choice")
    named = [function for function in functions if function.name == name]
    if not named:
        raise RequestError(f"tool_choice names {name[:64]!r}, which is not in tools", None, "tool_choice")
    return named[0]


def _allowed(functions: Sequence[Function], allowed: Any) -> tuple[tuple[Function, ...], bool]:
    """Choose by {"mode": "auto" or "required", "tools": [...]}. The prompt keeps the other tools."""
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list) or not tools or allowed.get("mode") not in ("auto", "required"):
        hint = 'allowed_tools has a mode, "auto" or "required", and tools'
        raise RequestError("tool_choice allows no tools", hint, "tool_choice")
    names = {_named(functions, tool).name for tool in tools}
    return tuple(one for one in functions if one.name in names), allowed["mode"] == "required"


Check = Callable[[Function], object]  # raises RequestError for a function whose grammar does not compile


def widened(functions: Sequence[Function], check: Check) -> tuple[Function, ...]:
    """Widen the schemas that do not compile, unless their function is strict.

    Raises RequestError that names the first function for which nothing helps.
    """
    end = time.monotonic() + WIDENING_S
    return tuple(_widened(function, index, check, end) for index, function in enumerate(functions))


def _widened(function: Function, index: int, check: Check, end: float) -> Function:
    problem = _problem(function, check)
    if problem is None:
        return function
    for schema, warning in () if function.strict else looser(function.schema):
        schema["x-guidance"] = function.schema["x-guidance"]
        wide = function._replace(schema=schema, warnings=(*function.warnings, f"{warning}: {problem}"))
        if time.monotonic() < end and _problem(wide, check) is None:
            return wide
    raise _wrong(f"tools[{index}].function.parameters", f"cannot be enforced: {problem}")


def _problem(function: Function, check: Check) -> str | None:
    try:
        check(function)
    except RequestError as error:
        return re.sub(r"^structured_outputs\.\w+: ", "", error.message)
    return None


def warnings_of(functions: Sequence[Function]) -> Iterator[str]:
    """Return warnings about what the grammar of these functions leaves out of their schemas."""
    warnings = [f"tool {function.name}: {warning}" for function in functions for warning in function.warnings]
    yield from warnings[:MAX_WARNINGS]
    if len(warnings) > MAX_WARNINGS:
        yield f"{len(warnings) - MAX_WARNINGS:,} more of the tools' keywords are not enforced"


def _read_function(tool: Any, where: str) -> Function:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise _wrong(where, 'is not of the form {"type": "function", "function": {"name": ...}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(
            f"{where}.function.name", "is not 1 to 128 letters, digits, dots, dashes and underscores"
        )
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{where}.function.description", "is not text")
    if not isinstance(parameters, Mapping | None):
        raise _wrong(f"{where}.function.parameters", "is not a JSON schema, an object")
    strict, warnings = function.get("strict") is True, list[str]()
    schema: dict[str, Any] = {"properties": {}} if parameters is None else dict(parameters)
    if not strict:
        schema, warnings = loosened(schema)
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise _wrong(f"{where}.function.parameters", "is not the schema of an object")
    return Function(name, _schema(schema), strict, tuple(warnings))


def _schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a schema: a function without parameters takes {}; one with a list of them takes no others."""
    schema = tighten_formats(parameters)
    schema["type"] = "object"
    if "properties" in schema and not schema.keys() & OPEN:
        schema["additionalProperties"] = False
    return schema | {"x-guidance": _OPTIONS}


def unanchored(pattern: str) -> tuple[str, bool, bool]:
    """Return a pattern without anchors at its ends, and for each end True if it had one."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    return pattern[begins : len(pattern) - ends], begins, ends


def _wrong(where: str, problem: str) -> RequestError:
    return RequestError(f"{where} {problem}", None, where)
