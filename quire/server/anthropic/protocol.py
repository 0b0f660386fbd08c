"""Requests, responses and events of /v1/messages, and the conversion of a request to a conversation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.anthropic.edits import AppliedEdit, ContextManagement, edits_of
from quire.server.anthropic.tools import MessagesTool, ToolChoice, functions_of
from quire.server.anthropic.turns import InputBlock, Name, Turn, messages_of
from quire.server.chat_task import ChatTask
from quire.server.generation_fields import GenerationFields, given_of, refuse
from quire.server.unsupported_fields import REFUSED

# As unsupported_fields.REFUSED, for this API alone.
REFUSED_HERE = {
    "compaction": "ask for a summary in a message",
    "container": None,
    "mcp_servers": "this server runs no tools",
    "n": "send several requests",
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
    """Options of the answer. `effort` sets the template's variable reasoning_effort."""

    format: OutputConfigFormat | None = None
    effort: Name | None = None
    task_budget: dict[str, Any] | None = None


class RequestMetadata(Struct, kw_only=True):
    """The client's notes, which nothing here reads."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountRequest(GenerationFields, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[Turn]
    system: str | list[InputBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputConfigFormat | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None
    compaction: Any = None
    container: Any = None
    context_management: ContextManagement | None = None
    inference_geo: Name | None = None
    mcp_servers: list[Any] | None = None
    speed: Name | None = None
    thread: Any = None
    # Matters of Anthropic's servers, and of caching: common beginnings of prompts are always cached here.
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None


class TextBlock(Struct, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """The model's reasoning before the answer."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of a tool. `input` is empty where the answer ended within it."""

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingDetails(Struct):
    """The part of the output tokens that is reasoning."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Numbers of tokens. `input_tokens` are those not found in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation_input_tokens: int = 0


class Edits(Struct):
    """The edits of context_management that changed the conversation."""

    applied_edits: list[AppliedEdit]


class MessageReply(Struct, kw_only=True):
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


class MessageStart(Struct, tag="message_start"):
    """The first event, sent with the first token: the cached part of the input is known then."""

    message: MessageReply


class ContentBlockStart(Struct, tag="content_block_start"):
    """A block starts; it is empty."""

    index: int
    content_block: OutputBlock


class TextDelta(Struct, tag="text_delta"):
    """More of a TextBlock."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More of a ThinkingBlock."""

    thinking: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More of a ToolUseBlock's input, as JSON text."""

    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(Struct, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: BlockDelta


class ContentBlockStop(Struct, tag="content_block_stop"):
    """A block has ended."""

    index: int


class StopDelta(Struct):
    """The reason why a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", kw_only=True):
    """The fields of a message that are known at its end."""

    delta: StopDelta
    usage: MessageUsage
    timings: dict[str, float] | UnsetType
    context_management: Edits | UnsetType


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


class Ping(Struct, tag="ping"):
    """An event that breaks a silence."""


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping


class TokensBefore(Struct):
    """The number of tokens before the edits of context_management."""

    original_input_tokens: int


class MessageTokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: TokensBefore | UnsetType = UNSET


def task_of(asked: CountRequest, sees: bool = False) -> ChatTask:
    """Return the request in neutral terms. Raises RequestError for what is not supported.

    Its images are for a model that `sees`.
    """
    refuse(asked, REFUSED)
    refuse(asked, REFUSED_HERE)
    if asked.thread is not None:  # Anthropic's client then sends all messages each time, by itself
        problem = "thread is not supported: nothing is kept between requests"
        raise RequestError(problem, "send all messages each time", "thread", "thread_unsupported_request")
    sampling = given_of(asked)
    if isinstance(asked, MessagesRequest) and asked.stop_sequences:
        sampling["stop"] = asked.stop_sequences
    config, thinking = asked.output_config or OutputConfig(), asked.thinking
    if (structured := _structured(asked)) is not None:
        sampling["structured_outputs"] = structured
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        if thinking.type not in THINKING:
            problem = f"thinking of type {thinking.type[:64]!r} is not supported"
            raise RequestError(problem, f"one of {', '.join(THINKING)}", "thinking")
        kwargs["enable_thinking"] = thinking.type != "disabled"
    if config.effort is not None:
        kwargs["reasoning_effort"] = EFFORTS.get(config.effort, config.effort)
    choice = asked.tool_choice or ToolChoice(type="auto")
    functions, tool_choice, tool_warnings = functions_of(asked.tools or (), choice, asked.messages)
    messages, warnings = messages_of(asked.system, asked.messages, sees)
    continues = bool(asked.messages) and asked.messages[-1].role == "assistant"
    return ChatTask(
        messages=messages,
        sampling=sampling,
        tools=functions or None,
        tool_choice=tool_choice,
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        chat_template_kwargs=kwargs | (asked.chat_template_kwargs or {}),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        include_reasoning=thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
        warnings=tool_warnings + warnings + edits_of(asked.context_management)[1],
    )


def structure_field(asked: CountRequest) -> str | None:
    """Return the field in which the request asks for a structure of the text."""
    if asked.output_format is not None:
        return "output_format"
    newer = asked.output_config and asked.output_config.format
    return "output_config.format" if newer is not None else None


def _structured(asked: CountRequest) -> StructuredOutputsParams | None:
    newer = asked.output_config and asked.output_config.format
    form, name = newer or asked.output_format, structure_field(asked)
    if form is None or name is None:
        return None
    if newer is not None and asked.output_format is not None:
        problem = "output_format and output_config.format contradict each other"
        raise RequestError(problem, "give output_config.format alone", "output_format")
    if form.type != "json_schema" or form.schema is None:
        problem = f"{name} must be of type json_schema and have a schema"
        raise RequestError(problem, None, name.partition(".")[0])
    return StructuredOutputsParams(json=form.schema)


def without_effect(asked: CountRequest, effort_is_read: bool) -> list[str]:
    """Return warnings about fields that are accepted and do nothing."""
    config = asked.output_config or OutputConfig()
    given = {
        "thinking.budget_tokens": asked.thinking and asked.thinking.budget_tokens,
        "output_config.effort": not effort_is_read and config.effort,
        "output_config.task_budget": config.task_budget,
        "inference_geo": asked.inference_geo,
        "speed": asked.speed not in (None, "standard"),
    }
    return [f"{name} has no effect" for name, value in given.items() if value]
