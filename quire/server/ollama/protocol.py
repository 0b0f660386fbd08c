"""Requests and responses of /api/chat and /api/generate, and their conversion to a ChatTask."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, defstruct

from quire.errors import RequestError
from quire.images.prompt import image_part
from quire.sampling_params import MAX_LOGPROBS, StructuredOutputsParams
from quire.server import llama_options
from quire.server.body import nested
from quire.server.chat_task import ChatTask
from quire.server.generation_fields import refuse
from quire.server.llama_options import LlamaSampling
from quire.server.service import ServiceState

# Options of model loading, which change no answer.
IGNORED = (
    *("draft_num_predict", "num_batch", "num_gpu", "num_keep", "num_thread", "main_gpu", "numa", "low_vram"),
    *("f16_kv", "logits_all", "vocab_only", "embedding_only", "use_mmap", "use_mlock"),
)
# Unsupported fields of /api/generate that would change the answer, as in unsupported_fields.
REFUSED = {
    "template": "the model's own template is used; with raw, the prompt is used verbatim",
    "context": "send the conversation to /api/chat",
    **dict.fromkeys(("width", "height", "steps"), "this server generates no images"),
}
REFUSED_OPTIONS = {"n": "send several requests", "prompt_logprobs": "use /v1/completions"}
LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
NAMES = {
    r"^max_tokens\b": "options.num_predict",
    r"^repetition_penalty\b": "options.repeat_penalty",
    r"^(temperature|top_k|top_p|min_p|presence_penalty|frequency_penalty|seed|stop)\b": r"options.\1",
    r"^logprobs\b": "top_logprobs",
    r"^structured_outputs(\.\w+)?": "format",
}
if TYPE_CHECKING:
    _Untyped = LlamaSampling
else:
    _Untyped = defstruct(
        "_Untyped", [(name, Any, None) for name in IGNORED], bases=(LlamaSampling,), kw_only=True
    )


class OllamaOptions(_Untyped, kw_only=True):
    """The fields of `options`."""

    num_predict: int | None = None
    num_ctx: int | None = None


class OllamaInputFunction(Struct, kw_only=True):
    """A function called earlier, and its arguments."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaInputCall(Struct, kw_only=True):
    """A tool call in an assistant's message."""

    function: OllamaInputFunction
    id: str | None = None


class OllamaInputMessage(Struct, kw_only=True):
    """A message of system, user, assistant or tool. A final assistant message is continued."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaInputCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(Struct, kw_only=True):
    """Fields of both requests. `format` is "json" or a schema; `stream` defaults to true."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of /api/chat."""

    messages: list[OllamaInputMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class OllamaFunction(Struct):
    """A function call; `arguments` is an object."""

    index: int
    name: str
    arguments: Raw


class OllamaToolCall(Struct):
    """A tool call of the model."""

    id: str
    function: OllamaFunction


class OllamaMessage(Struct, kw_only=True):
    """The model's message or, in a stream, the next part of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaReply(Struct, kw_only=True):
    """Fields of both responses. In a stream only the last line has those after `done`. Nanoseconds."""

    model: str
    created_at: datetime
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class OllamaChatReply(OllamaReply, kw_only=True):
    """The response of /api/chat, and each line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, kw_only=True):
    """The response of /api/generate, and each line of its stream."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class OllamaTask(NamedTuple):
    """A conversation, or in place of its template `raw`, a verbatim prompt, or the text before a `suffix`.

    `chat` is None if there is nothing to generate.
    """

    chat: ChatTask | None
    raw: str | None = None
    suffix: str | None = None


def chat_task(asked: OllamaChatRequest, service: ServiceState) -> OllamaTask:
    """Convert a request to /api/chat. Raises RequestError for anything unsupported."""
    if not asked.messages:
        return OllamaTask(None)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(asked.messages)]
    _give_ids(messages)
    return OllamaTask(_task(asked, service, messages, asked.tools))


def generate_task(asked: OllamaGenerateRequest, service: ServiceState) -> OllamaTask:
    """Convert a request to /api/generate, likewise."""
    for name, instead in REFUSED.items():
        if getattr(asked, name):
            raise RequestError(f"{name} is not supported", instead, name, "unsupported_parameter")
    if not asked.prompt and not asked.images and not asked.suffix:
        return OllamaTask(None)
    for name, given in (("raw", asked.raw), ("suffix", asked.suffix)):
        if given and asked.system:
            raise RequestError(f"{name} uses the prompt verbatim", "include system in the prompt", "system")
        if given and asked.images:
            raise RequestError(f"{name} uses the prompt verbatim", f"send images without {name}", "images")
    if asked.raw and asked.suffix:
        raise RequestError("raw uses the prompt verbatim", "send suffix without raw", "suffix")
    prompt = asked.prompt or ""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _content(prompt, asked.images, "images")}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    verbatim = prompt if asked.raw or asked.suffix else None
    return OllamaTask(_task(asked, service, messages), verbatim, asked.suffix or None)


def _task(
    asked: OllamaRequest,
    service: ServiceState,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> ChatTask:
    options, unknown = nested(asked.options or {}, OllamaOptions, "options")
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    warnings = [f"unknown option {name[:64]!r} has no effect" for name in unknown[:16]]
    if (options.num_ctx or 0) > (most := service.frontend.max_model_len):
        warnings.append(f"num_ctx = {options.num_ctx}: the context has {most} tokens (--max-model-len)")
    if isinstance(asked.think, str) and not service.template_reads("reasoning_effort"):
        warnings.append(f"think = {asked.think[:64]!r} has the effect of true: this model has no levels")
    return ChatTask(
        messages=messages,
        sampling=_sampling(asked, options),
        tools=tools or None,
        chat_template_kwargs=_thinking(asked, service),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        include_reasoning=asked.think is not False,
        warnings=warnings + llama_options.without_effect(options),
    )


def _sampling(asked: OllamaRequest, options: OllamaOptions) -> dict[str, Any]:
    refuse(options, REFUSED_OPTIONS)
    sampling = llama_options.sampling_of(options)
    if options.num_predict is not None:
        sampling["max_tokens"] = llama_options.max_tokens_of(options.num_predict, "options.num_predict")
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    elif asked.top_logprobs:
        raise RequestError("top_logprobs needs logprobs", "set logprobs to true", "top_logprobs")
    if asked.format == "json":
        sampling["structured_outputs"] = StructuredOutputsParams(json_object=True)
    elif isinstance(asked.format, dict):
        sampling["structured_outputs"] = StructuredOutputsParams(json=asked.format)
    elif asked.format:
        raise RequestError(
            f"format = {asked.format[:64]!r} is not known", '"json" or a JSON schema', "format"
        )
    return sampling


def _thinking(asked: OllamaRequest, service: ServiceState) -> dict[str, Any]:
    """Return the template's variables for `think`."""
    if asked.think is None:
        return {}
    if isinstance(asked.think, str) and asked.think not in LEVELS:
        problem = f"think = {asked.think[:64]!r} is not known"
        raise RequestError(problem, "true, false, or one of low, medium, high, max", "think")
    if asked.think and service.output_format.reasoning is None:
        raise RequestError(f'"{service.names[0]}" does not support thinking', "leave think out", "think")
    if isinstance(asked.think, str):
        return {"enable_thinking": True, "reasoning_effort": LEVELS[asked.think]}
    return {"enable_thinking": asked.think}


def _message(message: OllamaInputMessage, where: str) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect."""
    content = _content(message.content or "", message.images, f"{where}.images")
    found: dict[str, Any] = {"role": message.role.lower(), "content": content}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    named = {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return found | {name: value for name, value in named.items() if value is not None}


def _call(call: OllamaInputCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _give_ids(messages: list[dict[str, Any]]) -> None:
    """Give ids to tool calls without one, and to the results that follow them: some templates require ids.

    They are the same each time, so that a continued conversation is found in the prefix cache. The strictest
    template requires nine letters and digits.
    """
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            count += 1
            waiting.append(call.setdefault("id", f"call{count:05}"))
        if message["role"] == "tool" and waiting:
            given = message.setdefault("tool_call_id", waiting[0])
            waiting = [one for one in waiting if one != given]


def _content(text: str, images: list[str] | None, where: str) -> str | list[dict[str, Any]]:
    """Return a text or, with images in base64, parts: images come first, as in Ollama."""
    if not images:
        return text
    urls = (one if one.startswith("data:") else f"data:image/png;base64,{one}" for one in images)
    parts = [image_part(url, f"{where}[{number}]") for number, url in enumerate(urls)]
    return [*parts, {"type": "text", "text": text}] if text else parts
