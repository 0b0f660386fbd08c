"""Tools as /v1/messages takes them: which the model may call, and which only Anthropic's servers run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from quire.errors import RequestError
from quire.server.anthropic.turns import MAX_LEFT_OUT, InputBlock, Turn, is_result

# Types of tools that run on Anthropic's servers begin so. A date follows.
SERVER_TOOLS = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
_SEARCH = "tool_search_tool_"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Tool(Struct, kw_only=True):
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


class Offered:
    """The tools that a model can be offered, and what its choice among them is.

    Those that only Anthropic's servers run are left out, since they would never be run; `warnings` tell.
    """

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, turns: Sequence[Turn]) -> None:
        self.warnings: list[str] = []
        self._left_out: set[str | None] = set()
        # Where Anthropic's servers would search for the tools to load, nobody does: all are loaded.
        searched = any((tool.type or "").startswith(_SEARCH) for tool in tools)
        loaded = None if searched else set(_referenced(turns))
        self.tools = [*self._functions(tools, loaded)]
        if (more := len(self.warnings) - MAX_LEFT_OUT) > 0:
            self.warnings[MAX_LEFT_OUT:] = [f"{more} more tools are left out"]
        self.choice = self._choice(choice)

    def _functions(self, tools: Sequence[Tool], loaded: set[str] | None) -> Iterator[dict[str, Any]]:
        for index, tool in enumerate(tools):
            if (reason := _not_here(tool)) is not None:
                self._left_out.add(tool.name)
                self.warnings.append(f"tool {(tool.name or '')[:64]!r} is left out: {reason}")
            elif loaded is None or not tool.defer_loading or tool.name in loaded:
                yield _function(tool, f"tools[{index}]")

    def _choice(self, choice: ToolChoice) -> Any:
        if choice.type == "tool":
            if choice.name is not None and choice.name in self._left_out:
                problem = f"tool_choice names {choice.name[:64]!r}, which only Anthropic's servers run"
                raise RequestError(problem, "offer a tool with an input_schema, and run it", "tool_choice")
            return {"name": choice.name}
        if choice.type not in _CHOICES:
            problem = f"tool_choice of type {choice.type[:64]!r} is not supported"
            raise RequestError(problem, "one of auto, any, tool, none", "tool_choice")
        return _CHOICES[choice.type]


def _not_here(tool: Tool) -> str | None:
    """Why the model cannot call a tool; None if it can, or if the request is to be refused for it."""
    if (kind := tool.type or "").startswith(SERVER_TOOLS):
        return f"only Anthropic's servers run tools of type {kind[:64]!r}"
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        return "only code that Anthropic's servers run may call it"
    return None


def _function(tool: Tool, where: str) -> dict[str, Any]:
    """A tool in the form that templates read."""
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


def _referenced(turns: Sequence[Turn]) -> Iterator[str]:
    """The tools that results of tools name, so that they be loaded."""
    for turn in turns:
        for block in turn.content if isinstance(turn.content, list) else ():
            inner = block.content if is_result(block) and isinstance(block.content, list) else ()
            yield from (name for one in (block, *inner) if (name := _reference(one)))


def _reference(block: InputBlock) -> str | None:
    return block.tool_name if block.type == "tool_reference" else None
