"""What /v1/messages takes and gives, and how it becomes a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.openai.conversation import ChatTask
from quire.server.openai.protocol import REFUSED, Asked, given_of, refuse

# As in openai.protocol, of this interface.
REFUSED_HERE = {
    "container": None,
    "context_management": None,
    "mcp_servers": "this server runs no tools",
    "n": "ask several times",
    "prompt_logprobs": "use /v1/chat/completions",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Name = Annotated[str, Meta(max_length=256)]


class InputBlock(Struct, kw_only=True):
    """text, tool_use or tool_result; thinking, which is not read."""

    type: str
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | list[InputBlock] | None = None


class Turn(Struct, kw_only=True):
    """A message of user, assistant or system. The answer goes on with an assistant's that comes last."""

    role: str
    content: str | list[InputBlock]


class Tool(Struct, kw_only=True):
    """A function that the model may call."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    """`type` is auto, any, none, or tool with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Sets the variable enable_thinking of the template: false if the type is disabled."""

    type: str
    budget_tokens: int | None = None
    display: Name | None = None


class OutputFormat(Struct, kw_only=True):
    """A JSON schema for the text."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True):
    """How the answer is to be."""

    format: OutputFormat | None = None
    effort: Name | None = None


class RequestMetadata(Struct, kw_only=True):
    """The client's own affair."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountRequest(Asked, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[Turn]
    system: str | list[InputBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Any = None
    context_management: Any = None
    mcp_servers: list[Any] | None = None
    thread: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None


class TextBlock(Struct, tag="text"):
    """What the model says."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """What it thought first."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call that it makes. `input` is empty where the answer ended for length within it."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingDetails(Struct):
    """Of the output's tokens, those the model thought with."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Tokens: of the input, those computed apart from those taken from the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True):
    """The response of /v1/messages."""

    id: str
    model: str
    usage: MessageUsage
    content: list[OutputBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    timings: dict[str, float] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class TokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


def task_of(asked: CountRequest) -> ChatTask:
    """The request in neutral terms. Raises RequestError for what is not supported."""
    refuse(asked, REFUSED)
    refuse(asked, REFUSED_HERE)
    if asked.thread is not None:  # Anthropic's client then sends all messages each time, by itself
        problem = "thread is not supported: nothing is kept between requests"
        raise RequestError(problem, "send all messages each time", "thread", "thread_unsupported_request")
    sampling = given_of(asked)
    if isinstance(asked, MessagesRequest) and asked.stop_sequences:
        sampling["stop"] = asked.stop_sequences
    if asked.output_config is not None and (form := asked.output_config.format) is not None:
        if form.type != "json_schema" or form.schema is None:
            problem = "output_config.format is not of type json_schema, or lacks its schema"
            raise RequestError(problem, None, "output_config")
        sampling["structured_outputs"] = StructuredOutputsParams(json=form.schema)
    choice, thinking = asked.tool_choice or ToolChoice(type="auto"), asked.thinking
    going_on = bool(asked.messages) and asked.messages[-1].role == "assistant"
    return ChatTask(
        messages=list(_messages(asked)),
        sampling=sampling,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ())] or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        chat_template_kwargs=_thinking(thinking) | (asked.chat_template_kwargs or {}),
        add_generation_prompt=not going_on,
        continue_final_message=going_on,
        include_reasoning=thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
    )


def without_effect(asked: CountRequest) -> list[str]:
    """Warnings of fields that are taken and do nothing."""
    given = {
        "thinking.budget_tokens": asked.thinking and asked.thinking.budget_tokens,
        "output_config.effort": asked.output_config and asked.output_config.effort,
    }
    return [f"{name} has no effect" for name, value in given.items() if value]


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        problem = f"thinking of type {thinking.type[:64]!r} is not supported"
        raise RequestError(problem, "one of enabled, adaptive, disabled", "thinking")
    return {"enable_thinking": thinking.type != "disabled"}


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        problem = f"{where}: a tool of type {tool.type[:64]!r} is not supported"
        raise RequestError(problem, "this server runs no tools: give name, description, input_schema", where)
    given: dict[str, Any] = {"name": tool.name, "description": tool.description}
    given |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: v for name, v in given.items() if v is not None}}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"name": choice.name}
    if choice.type not in _CHOICES:
        problem = f"tool_choice of type {choice.type[:64]!r} is not supported"
        raise RequestError(problem, "one of auto, any, tool, none", "tool_choice")
    return _CHOICES[choice.type]


def _messages(asked: CountRequest) -> Iterator[dict[str, Any]]:
    """In the form that templates read."""
    if asked.system:
        yield {"role": "system", "content": _text(asked.system, "system")}
    for index, turn in enumerate(asked.messages):
        where, content = f"messages[{index}]", turn.content
        blocks = [InputBlock(type="text", text=content)] if isinstance(content, str) else content
        if turn.role == "user":
            yield from _user(blocks, where)
        elif turn.role == "assistant":
            yield _assistant(blocks, where)
        elif turn.role == "system":
            yield {"role": "system", "content": _text(blocks, where)}
        else:
            hint = "one of user, assistant, system"
            raise RequestError(f"{where} has no role that is known", hint, "messages")


def _user(blocks: Sequence[InputBlock], where: str) -> Iterator[dict[str, Any]]:
    """What came of calls, each a message of its own, then what the user says."""
    texts = [block for block in blocks if block.type != "tool_result"]
    for block in blocks:
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise RequestError(f"{where}: a tool_result lacks its tool_use_id", None, "messages")
            content = _text(block.content or "", where)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not blocks:
        yield {"role": "user", "content": _text(texts, where)}


def _assistant(blocks: Sequence[InputBlock], where: str) -> dict[str, Any]:
    said, calls = [], []
    for block in blocks:
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise RequestError(f"{where}: a tool_use lacks its id or its name", None, "messages")
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type not in ("thinking", "redacted_thinking"):
            said.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _text(said, where)}
    return message | {"tool_calls": calls} if calls else message


def _text(content: str | Sequence[InputBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            problem = f"{where}: a block of type {block.type[:64]!r} is not supported here, or has no text"
            raise RequestError(problem, "this server reads text alone", where.partition("[")[0])
    return "\n".join(block.text or "" for block in content)
