"""Requests and response of /completion and /infill, and the sampling parameters of a request."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from quire.errors import RequestError
from quire.frontend import Frontend
from quire.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.server import llama_options
from quire.server.field_names import renaming_fields
from quire.server.generation_fields import end_infill, refuse
from quire.server.llama_options import LlamaSampling
from quire.server.unsupported_fields import OFF_FROM, OFF_UP_TO
from quire.text.tokenizer import Tokenizer

# As in unsupported_fields, of this interface alone.
REFUSED_HERE = {
    **dict.fromkeys(
        ("grammar_lazy", "grammar_triggers", "preserved_tokens"), "use tools of /v1/chat/completions"
    ),
    **dict.fromkeys(("n", "n_cmpl"), "send the prompt several times"),
    "image_data": "send images in messages to /v1/chat/completions",
    "prompt_logprobs": "use /v1/completions",
    "system_prompt": "include it in the prompt",
}
# Fields of unsupported_fields.REFUSED that this interface supports.
SUPPORTED = (
    *llama_options.SUPPORTED,
    "grammar",
    "json_schema",
    "n_indent",
    "n_predict",
    "n_probs",
    "return_tokens",
    "samplers",
    "t_max_predict_ms",
    "t_max_prompt_ms",  # has no effect in llama.cpp
)
# Samplers in llama.cpp's default order, and those that are supported here.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
ACTIVE = ("top_k", "top_p", "min_p", "temperature")
_WITHOUT: dict[str, dict[str, Any]] = {
    "penalties": llama_options.PENALTIES_OFF,
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
_SPELLINGS = {"top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "temp": "temperature"}
_LETTERS = dict(zip("edskypmxti", (*SAMPLERS, "infill"), strict=True))
_NAMES = {
    r"^max_tokens\b": "n_predict",
    r"^repetition_penalty\b": "repeat_penalty",
    r"^logprobs\b": "n_probs",
    r"^bad_words_token_ids\b": "logit_bias",
    r"^structured_outputs\.grammar\b": "grammar",
    r"^structured_outputs(\.json)?\b": "json_schema",
}
# A number or false. Checked below: as float, each subnormal number would take 10 µs to decode.
Bias = Annotated[Any, Meta(extra_json_schema={"type": ["number", "boolean"]})]


class ContinuationRequest(LlamaSampling, kw_only=True):
    """Fields of /completion and /infill, without the text to continue.

    `n_indent` and `t_max_predict_ms` end the text at a line break: see LineEnds. Of the last event, or the
    response, `response_fields` names those to send, as "timings/predicted_n" where it is within another.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    n_indent: Annotated[int, Meta(ge=0)] | None = None
    t_max_predict_ms: float | None = None
    response_fields: list[str] | None = None
    logit_bias: list[tuple[int | str, Bias]] | dict[str, Bias] | None = None  # type: ignore[assignment]
    return_tokens: bool | None = None
    return_progress: bool | None = None
    samplers: str | list[str] | None = None
    timings_per_token: bool | None = None
    image_data: Any = None
    system_prompt: Any = None


class LlamacppCompletionRequest(ContinuationRequest, kw_only=True):
    """Body of /completion. `prompt` is text, token ids, a list of both, or a list of prompts."""

    prompt: str | list[str | int | list[str | int]]


class InfillFile(Struct):
    """Another file, or a part of one."""

    text: str = ""
    filename: str = "tmp"


class InfillRequest(ContinuationRequest, kw_only=True):
    """Body of /infill: the texts before and after the gap, other files, and what the gap begins with."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None


class Timings(Struct):
    """Times of a prompt and its continuation, in milliseconds and tokens per second.

    `draft_n` tokens were drafted and verified, if any, and `draft_n_accepted` of them were right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class PartialContinuation(Struct, kw_only=True):
    """Event of a stream: text and tokens since the previous one."""

    index: int
    content: str
    tokens: list[int] = []
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: Raw | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Continuation(PartialContinuation, kw_only=True):
    """Response of /completion and, with empty content, the last event of a stream."""

    model: str
    generation_settings: dict[str, Any]
    prompt: str = ""
    has_new_line: bool = False
    truncated: bool = False
    stop_type: str
    stopping_word: str = ""
    tokens_cached: int
    warnings: list[str] | UnsetType = UNSET


def params_of(asked: ContinuationRequest, frontend: Frontend) -> SamplingParams:
    """Return a request's parameters, or the model's defaults. Raises RequestError if unsupported."""
    refuse(asked, REFUSED_HERE)
    given = llama_options.sampling_of(asked, SUPPORTED) | _without(asked.samplers)
    given["max_tokens"] = 1 if is_silent(asked) else llama_options.max_tokens_of(_limit(asked), "n_predict")
    if isinstance(asked, InfillRequest):
        end_infill(given, frontend)
    given["logprobs"] = asked.n_probs or None
    given["structured_outputs"] = _structure(asked)
    given |= _biases(asked, frontend)
    with named():
        return SamplingParams.from_dict(given, {"max_tokens": None, **frontend.default_params})


def is_silent(asked: ContinuationRequest) -> bool:
    """Return whether the prompt shall be computed, for later ones that begin alike, and nothing generated."""
    return _limit(asked) == 0


def _limit(asked: ContinuationRequest) -> int | None:
    return asked.max_tokens if asked.n_predict is None else asked.n_predict


def named() -> AbstractContextManager[None]:
    """Translate field names in errors raised within into those of this interface."""
    return renaming_fields(_NAMES)


def without_effect(asked: ContinuationRequest) -> list[str]:
    """Return warnings about fields of this endpoint that have no effect, or another one."""
    warnings = ["return_progress has no effect"] if asked.return_progress else []
    named = _named(asked.samplers)
    warnings += [f"samplers: {name[:32]!r} is not applied" for name in named if name not in SAMPLERS][:16]
    active = [name for name in named if name in ACTIVE]
    if len(active) > 1 and {"temperature", "min_p"} & {*active}:  # of the others the order is that of here
        warnings.append("samplers are applied in this order: temperature, then min_p and top_k, then top_p")
    return warnings


def settings_of(params: SamplingParams, n_ctx: int) -> dict[str, Any]:
    """Return the parameters under llama.cpp's names, with unsupported samplers turned off."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_ctx": n_ctx,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **OFF_UP_TO,
        **OFF_FROM,
        "samplers": list(SAMPLERS),
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "n_keep": 0,
    }


def _structure(asked: ContinuationRequest) -> StructuredOutputsParams | None:
    if asked.grammar and asked.json_schema is not None:
        raise RequestError("grammar and json_schema contradict each other", "send one of them", "json_schema")
    with named():
        if asked.grammar:
            return StructuredOutputsParams(grammar=asked.grammar)
        if asked.json_schema is None or asked.json_schema is False:
            return None
        return StructuredOutputsParams(json=asked.json_schema)


def _without(samplers: str | list[str] | None) -> dict[str, Any]:
    """Return the fields that turn off what a list of samplers leaves out.

    Raises RequestError unless those that are supported are in llama.cpp's order.
    """
    if not samplers:
        return {}
    named = _named(samplers)
    if [name for name in named if name in ACTIVE] != [name for name in ACTIVE if name in named]:
        hint = f"list {', '.join(ACTIVE)} in this order, each once"
        raise RequestError("samplers has another order", hint, "samplers", "unsupported_parameter")
    return {field: value for name in _WITHOUT.keys() - {*named} for field, value in _WITHOUT[name].items()}


def _named(samplers: str | list[str] | None) -> list[str]:
    if isinstance(samplers, str):
        return [_LETTERS.get(letter, letter) for letter in samplers]
    return [_SPELLINGS.get(name, name) for name in samplers or ()]


def _biases(asked: ContinuationRequest, frontend: Frontend) -> dict[str, Any]:
    """Return biases by token, and disallowed tokens. A text stands for all its tokens."""
    if not asked.logit_bias:
        return {}
    if len(asked.logit_bias) > MAX_BIASED_TOKENS:
        raise RequestError(f"logit_bias has more than {MAX_BIASED_TOKENS:,} entries", None, "logit_bias")
    tokenizer = frontend.need_tokenizer()
    pairs = asked.logit_bias.items() if isinstance(asked.logit_bias, dict) else asked.logit_bias
    biases: dict[int, float] = {}
    banned: list[tuple[int, ...]] = []
    for name, bias in pairs:
        if bias is True or not isinstance(bias, int | float):
            raise RequestError("logit_bias: a bias must be a number or false", None, "logit_bias")
        for token_id in _tokens(name, tokenizer):
            if bias is False:
                banned.append((token_id,))
            else:
                biases[token_id] = bias
    return {"logit_bias": biases, "bad_words_token_ids": tuple(dict.fromkeys(banned))}


def _tokens(name: int | str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(name, int):
        return [name]
    if name.isascii() and name.isdigit() and len(name) <= 10:
        return [int(name)]
    if len(name) > MAX_BAD_WORD_CHARACTERS:
        problem = f"logit_bias: a text has more than {MAX_BAD_WORD_CHARACTERS} characters"
        raise RequestError(problem, None, "logit_bias")
    return tokenizer.encode(name, add_special_tokens=False)
