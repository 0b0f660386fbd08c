"""What /v1/messages takes and gives, and how it becomes a conversation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.anthropic.edits import Applied, ContextManagement, edits_of
from quire.server.anthropic.tools import Offered, Tool, ToolChoice
from quire.server.anthropic.turns import Conversation, InputBlock, Name, Turn
from quire.server.chat_task import ChatTask
from quire.server.generation_fields import GenerationFields, given_of, refuse
from quire.server.unsupported_fields import REFUSED

# As in openai.protocol, of this interface.
REFUSED_HERE = {
    "compaction": "ask for a summary in a message",
    "container": None,
    "mcp_servers": "this server runs no tools",
    "n": "ask several times",
    "prompt_logprobs": "use /v1/chat/completions",
}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high


class Thinking(Struct, kw_only=True):
    """Sets the variable enable_thinking of the template: false if the type is disabled."""

    type: str
    budget_tokens: int | None = None
    display: Name | None = None


class OutputConfigFormat(Struct, kw_only=True):
    """A JSON schema for the text."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True):
    """Options of the answer. A template that knows the variable reasoning_effort is told the effort."""

    format: OutputConfigFormat | None = None
    effort: Name | None = None
    task_budget: dict[str, Any] | None = None


class RequestMetadata(Struct, kw_only=True):
    """The client's own affair."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountRequest(GenerationFields, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[Turn]
    system: str | list[InputBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    compaction: Any = None
    container: Any = None
    context_management: ContextManagement | None = None
    inference_geo: Name | None = None
    mcp_servers: list[Any] | None = None
    speed: Name | None = None
    thread: Any = None
    # Anthropic's own affairs, and what is so anyway: the beginnings of prompts are always cached.
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None


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


class Edits(Struct):
    """The edits of context_management that changed the conversation."""

    applied_edits: list[Applied]


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
    context_management: Edits | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class TokensBefore(Struct):
    """The number of tokens before the edits of context_management."""

    original_input_tokens: int


class TokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: TokensBefore | UnsetType = UNSET


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
    offered = Offered(asked.tools or (), choice, asked.messages)
    conversation = Conversation(asked.system, asked.messages)
    going_on = bool(asked.messages) and asked.messages[-1].role == "assistant"
    return ChatTask(
        messages=conversation.messages,
        sampling=sampling,
        tools=offered.tools or None,
        tool_choice=offered.choice,
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        chat_template_kwargs=_template_kwargs(asked),
        add_generation_prompt=not going_on,
        continue_final_message=going_on,
        include_reasoning=thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
        warnings=offered.warnings + conversation.warnings + edits_of(asked.context_management)[1],
    )


def without_effect(asked: CountRequest, knows_effort: bool) -> list[str]:
    """Warnings of fields that are taken and do nothing. A template may know the variable reasoning_effort."""
    config = asked.output_config or OutputConfig()
    given = {
        "thinking.budget_tokens": asked.thinking and asked.thinking.budget_tokens,
        "output_config.effort": not knows_effort and config.effort,
        "output_config.task_budget": config.task_budget,
        "inference_geo": asked.inference_geo,
        "speed": asked.speed not in (None, "standard"),
    }
    return [f"{name} has no effect" for name, value in given.items() if value]


def _template_kwargs(asked: CountRequest) -> dict[str, Any]:
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.output_config is not None and (effort := asked.output_config.effort) is not None:
        kwargs.setdefault("reasoning_effort", EFFORTS.get(effort, effort))
    return _thinking(asked.thinking) | kwargs


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.type not in THINKING:
        problem = f"thinking of type {thinking.type[:64]!r} is not supported"
        raise RequestError(problem, f"one of {', '.join(THINKING)}", "thinking")
    return {"enable_thinking": thinking.type != "disabled"}
