"""Requests and responses of /v1/responses, and the conversion of a request to a conversation."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.errors import RequestError
from quire.sampling_params import MAX_LOGPROBS
from quire.server.chat_task import ChatTask
from quire.server.generation_fields import GenerationFields, given_of, refuse, structure_of
from quire.server.openai.history import Item, messages_of
from quire.server.openai.protocol import OutputDetails, PromptDetails, StreamOptions
from quire.server.openai.response_tools import CallItem, Name, ResponsesTool, Toolbox
from quire.server.unsupported_fields import REFUSED

_STATELESS = "nothing is kept between requests: send the whole conversation as input"
_CHAT = "use /v1/chat/completions"
# As unsupported_fields.REFUSED, for this API alone.
REFUSED_HERE = {
    "background": "omit it and wait for the response, or stream it",
    "context_management": None,
    "conversation": _STATELESS,
    "moderation": None,
    "n": _CHAT,
    "previous_response_id": _STATELESS,
    "prompt": _STATELESS,
    "prompt_logprobs": _CHAT,
    "truncation": "shorten the input",
}
# Values of `include`: one that is supported; and, without effect, one that agents always send and can do
# without, and details of calls that only OpenAI's servers run.
LOGPROBS = "message.output_text.logprobs"
IDLE_INCLUDES = (
    "reasoning.encrypted_content",
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results"),
)


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """Constraint on the text: `type` is text, json_object or json_schema."""

    type: str
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(Struct, kw_only=True):
    """Options of reasoning. `effort` sets the template's variable reasoning_effort."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None
    context: Name | None = None


Metadata = Annotated[dict[Name, Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)]


class ResponseRequest(GenerationFields, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: str | None = None


class OutputText(Struct, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputMessage(Struct, tag="message"):
    """A message of the model."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, tag="reasoning"):
    """The model's reasoning before a message or call."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


OutputItem = OutputMessage | ReasoningItem | CallItem


class ResponseUsage(Struct):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(Struct, kw_only=True):
    """The response of /v1/responses, with the options of the request."""

    id: str
    created_at: int
    model: str
    system_fingerprint: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[ResponsesTool]
    top_p: float
    user: str | None
    object: str = "response"
    status: str = "in_progress"
    completed_at: int | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    error: dict[str, str] | None = None
    background: bool = False
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    store: bool = False
    top_logprobs: int = 0
    truncation: str = "disabled"
    timings: dict[str, float] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class InputTokens(Struct):
    """The response of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


def task_of(asked: ResponseRequest, sees: bool = False) -> tuple[ChatTask, Toolbox]:
    """Return the request in neutral terms, and its tools. Raises RequestError for what is not supported.

    Its images are for a model that `sees`.
    """
    refuse(asked, REFUSED)
    refuse(asked, REFUSED_HERE)
    if refused := [name for name in asked.include or () if name not in (LOGPROBS, *IDLE_INCLUDES)]:
        raise RequestError(f"include of {refused[0][:64]!r} is not supported", None, "include")
    sampling = given_of(asked)
    if asked.top_logprobs or LOGPROBS in (asked.include or ()):
        sampling["logprobs"] = asked.top_logprobs or 0
    if asked.max_output_tokens is not None:
        sampling["max_tokens"] = asked.max_output_tokens
    form = None if asked.text is None else asked.text.format
    if form is not None and form.type != "text":
        sampling["structured_outputs"] = structure_of(form.type, form.schema, "text.format")
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", asked.reasoning.effort)
    toolbox = Toolbox()
    toolbox.add(asked.tools or (), "tools")
    messages = messages_of(asked.instructions, asked.input, toolbox, sees)  # which may add tools
    task = ChatTask(
        messages=messages,
        sampling=sampling,
        tools=toolbox.functions or None,
        tool_choice=toolbox.choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        chat_template_kwargs=kwargs,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
        warnings=toolbox.warnings,
    )
    return task, toolbox


def without_effect(asked: ResponseRequest, effort_is_read: bool) -> list[str]:
    """Return warnings about fields that are accepted and do nothing."""
    reasoning, text = asked.reasoning or ReasoningOptions(), asked.text or TextOptions()
    given = {
        "store": asked.store,
        **{f"include of {name}": name in (asked.include or ()) for name in IDLE_INCLUDES},
        "max_tool_calls": asked.max_tool_calls,  # of tools that the server runs, and it runs none
        "reasoning.effort": reasoning.effort if not effort_is_read else None,
        "reasoning.summary": reasoning.summary or reasoning.generate_summary,
        "reasoning.context": reasoning.context,
        "text.verbosity": text.verbosity,
    }
    return [f"{name} has no effect" for name, value in given.items() if value]
