"""Requests and responses of the chat and completions endpoints.

SamplingParams checks the ranges of its fields; other fields have theirs here. None means "not given"
throughout, as clients send it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from quire.errors import RequestError
from quire.sampling_params import MAX_INT32, MAX_LOGPROBS, StructuredOutputsParams
from quire.server.generation_fields import GenerationFields, given_of, refuse, structure_of
from quire.server.unsupported_fields import REFUSED


class StreamOptions(Struct, kw_only=True):
    """Additional content of a stream. (Events are never padded, so there is no obfuscation.)

    With `include_drafting` a chunk of its own tells of each step what it verified and which tokens it gave.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_drafting: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """A named schema; always enforced, whatever `strict` says."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's request for JSON: `type` is text, json_object or json_schema.

    The schema may also be next to the type: `schema`, which llama.cpp accepts with either, or TGI's `value`,
    whose type is json.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | str | None = None


class TextRequest(GenerationFields, kw_only=True):
    """Fields of both chat completions and completions."""

    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class TextPart(Struct, kw_only=True):
    """A piece of text."""

    text: str
    type: Literal["text"] = "text"


class PredictedAnswer(Struct, kw_only=True):
    """The answer as the client expects it, such as a file of which it asks to change a line."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatRequest(TextRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    include_reasoning: bool | None = None
    prediction: PredictedAnswer | None = None


class CompletionRequest(TextRequest, kw_only=True):
    """The body of /v1/completions. `prompt` is text, token ids, or a list of either.

    With `suffix` the answer is what is between the prompt and that.
    """

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class PromptDetails(Struct):
    """Prompt tokens taken from the prefix cache."""

    cached_tokens: int


class OutputDetails(Struct):
    """Tokens of the answer that are reasoning."""

    reasoning_tokens: int


class CompletionDetails(OutputDetails):
    """And those of a prediction that do and do not appear in the answer."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class TokenCounts(Struct):
    """Tokens read and written; a prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(Struct):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """One call of a function by the model."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Struct):
    """The model's turn."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: Raw | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    """One of `n` continuations of one of the prompts."""

    index: int
    text: str
    logprobs: Raw | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class _Reply(Struct, kw_only=True):
    """Fields of both responses."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: TokenCounts
    timings: dict[str, float]
    warnings: list[str] | UnsetType = UNSET


class ChatCompletion(_Reply, kw_only=True):
    """The response of /v1/chat/completions."""

    choices: list[ChatChoice]
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(_Reply, kw_only=True):
    """The response of /v1/completions."""

    choices: list[CompletionChoice]
    object: str = "text_completion"


def usage_of(
    prompt: int, cached: int, completion: int, reasoning: int = 0, accepted: int = 0, rejected: int = 0
) -> TokenCounts:
    """Return token counts in OpenAI's shape."""
    details = PromptDetails(cached), CompletionDetails(reasoning, accepted, rejected)
    return TokenCounts(prompt, completion, prompt + completion, *details)


def check(request: TextRequest, supported: Collection[str] = ()) -> None:
    """Raise RequestError for fields that are refused or contradict each other."""
    refuse(request, {name: instead for name, instead in REFUSED.items() if name not in supported})
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is for streams", "set stream to true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        problem = "prompt_logprobs come with the whole response"
        raise RequestError(problem, "set stream to false, or use echo with logprobs", "prompt_logprobs")


def reports_drafting(request: TextRequest) -> bool:
    """Return True if the stream is to tell what was drafted for it."""
    return request.stream_options is not None and request.stream_options.include_drafting is True


def sampling_of(request: TextRequest) -> dict[str, Any]:
    """Return the fields for SamplingParams.from_dict, with the requested structured output."""
    given = given_of(request)
    if (structured := _structured(request)) is not None:
        given["structured_outputs"] = structured
    return given


def _structured(request: TextRequest) -> StructuredOutputsParams | None:
    wanted = None
    if request.structured_outputs is not None:
        wanted = StructuredOutputsParams.from_dict(request.structured_outputs)
    form = request.response_format
    if form is None or form.type == "text":
        return wanted
    if wanted is not None:
        problem = "response_format and structured_outputs contradict each other"
        raise RequestError(problem, "give one of them", "response_format")
    return structure_of(form.type, _schema(form), "response_format")


def _schema(form: ResponseFormat) -> dict[str, Any] | None:
    """Return the schema of a format, wherever the request has it."""
    value = form.value
    if form.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema", value)
    own = form.json_schema and form.json_schema.schema
    given = [one for one in (own, form.schema, value) if one is not None]
    if len(given) > 1:
        problem = "response_format has more than one schema"
        raise RequestError(problem, "give json_schema alone", "response_format")
    return given[0] if given and isinstance(given[0], dict) else None


@contextmanager
def structure_named(asked: TextRequest) -> Iterator[None]:
    """Rename `structured_outputs` in errors to the field that the request used."""
    try:
        yield
    except RequestError as error:
        if error.param == "structured_outputs" and asked.structured_outputs is None:
            error.param = "tools" if asked.response_format is None else "response_format"
            error.message = error.param + error.message.removeprefix("structured_outputs")
        raise
