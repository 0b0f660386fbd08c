"""Tools of /v1/messages: those that the model may call, and those that only Anthropic's servers run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from quire.errors import RequestError
from quire.server.anthropic.turns import MAX_LEFT_OUT, Turn, blocks_of, is_result

# Prefixes of the types of tools that run on Anthropic's servers. A date follows.
_SEARCH = "tool_search_tool_"
SERVER_TOOLS = ("advisor_", "code_execution_", "mcp_toolset", _SEARCH, "web_fetch_", "web_search_")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTool(Struct, kw_only=True):
    """A function that the model may call. With `defer_loading`, not before a tool_reference names it."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(Struct, kw_only=True):
    """`type` is auto, any, none, or tool with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def functions_of(
    tools: Sequence[MessagesTool], choice: ToolChoice, turns: Sequence[Turn]
) -> tuple[list[dict[str, Any]], Any, list[str]]:
    """Return the functions that the model is offered, its choice among them, and warnings.

    Tools that only Anthropic's servers run are left out with a warning, since nobody would run them.
    """
    # Where Anthropic's servers would search for the tools to load, nobody does: all are loaded.
    searched = any((tool.type or "").startswith(_SEARCH) for tool in tools)
    loaded = {tool.name for tool in tools} if searched else set(_referenced(turns))
    functions, warnings, left_out = [], [], set()
    for index, tool in enumerate(tools):
        if (reason := _obstacle(tool)) is not None:
            left_out.add(tool.name)
            warnings.append(f"tool {(tool.name or '')[:64]!r} is left out: {reason}")
        elif not tool.defer_loading or tool.name in loaded:
            functions.append(_function(tool, f"tools[{index}]"))
    if (more := len(warnings) - MAX_LEFT_OUT) > 0:
        warnings[MAX_LEFT_OUT:] = [f"{more} more tools are left out"]
    if choice.type == "tool":
        if choice.name is not None and choice.name in left_out:
            problem = f"tool_choice names {choice.name[:64]!r}, which only Anthropic's servers run"
            raise RequestError(problem, "offer a tool with an input_schema, and run it", "tool_choice")
        return functions, {"name": choice.name}, warnings
    if choice.type not in _CHOICES:
        problem = f"tool_choice of type {choice.type[:64]!r} is not supported"
        raise RequestError(problem, "one of auto, any, tool, none", "tool_choice")
    return functions, _CHOICES[choice.type], warnings


def _obstacle(tool: MessagesTool) -> str | None:
    """Return the reason to leave a tool out, or None."""
    if (kind := tool.type or "").startswith(SERVER_TOOLS):
        return f"only Anthropic's servers run tools of type {kind[:64]!r}"
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        return "only code that Anthropic's servers run may call it"
    return None


def _function(tool: MessagesTool, where: str) -> dict[str, Any]:
    """Return a tool in the form that templates read."""
    if tool.type not in (None, "custom"):
        problem = f"{where}: a tool of type {tool.type[:64]!r} is not supported"
        raise RequestError(problem, "this server runs no tools: give name, description, input_schema", where)
    description = tool.description
    if tool.input_examples:
        examples = [json.dumps(example, ensure_ascii=False) for example in tool.input_examples]
        description = "\n".join([description or "", "Examples of its input:", *examples]).lstrip()
    given: dict[str, Any] = {"name": tool.name, "description": description}
    given |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: v for name, v in given.items() if v is not None}}


def _referenced(turns: Sequence[Turn]) -> Iterator[str | None]:
    """Yield the tools that results of tools refer to, and that are loaded by this."""
    for turn in turns:
        for block in blocks_of(turn):
            inner = block.content if is_result(block) and isinstance(block.content, list) else ()
            yield from (one.tool_name for one in (block, *inner) if one.type == "tool_reference")
