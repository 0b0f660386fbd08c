"""Fields of requests that every endpoint which generates text takes, and what becomes of unsupported ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, defstruct
from starlette.requests import Request

from quire.errors import RequestError
from quire.frontend import Frontend
from quire.sampling_params import MAX_INT32, StructuredOutputsParams
from quire.server.unsupported_fields import (
    IGNORED,
    IGNORED_PREFIX,
    OF_PENALTIES,
    REFUSED,
    has_effect,
)

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # over all prompts
MAX_WARNINGS, MAX_NAME = 16, 64  # unknown fields named in a response, and characters of each

if TYPE_CHECKING:
    _Untyped = Struct
else:
    _Untyped = defstruct("_Untyped", [(name, Any, None) for name in (*REFUSED, *IGNORED)], kw_only=True)

# Not dict[str, float], which takes 10 µs to decode each subnormal number. SamplingParams checks the values.
Biases = Annotated[dict[str, Any], Meta(extra_json_schema={"additionalProperties": {"type": "number"}})]
Int32 = Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)]


class SamplingFields(_Untyped, kw_only=True):
    """The fields of SamplingParams that requests give by the same name."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


SAMPLING = tuple(name for name in SamplingFields.__struct_fields__ if name not in (*REFUSED, *IGNORED))


class GenerationFields(SamplingFields, kw_only=True):
    """Fields of every endpoint that generates text, Anthropic's too."""

    model: str | None = None
    stream: bool | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None


def refuse(request: SamplingFields, refused: Mapping[str, str | None]) -> None:
    """Raise RequestError for a field of `refused` (name -> hint) that asks for anything."""
    for name, instead in refused.items():
        if not has_effect(name, getattr(request, name)):
            continue
        if name in OF_PENALTIES and not (request.presence_penalty or request.frequency_penalty):
            continue
        raise RequestError(f"{name} is not supported", instead, name, "unsupported_parameter")


def given_of(request: SamplingFields) -> dict[str, Any]:
    """Return the fields for SamplingParams.from_dict that the request gives."""
    return {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}


def end_infill(sampling: dict[str, Any], frontend: Frontend) -> None:
    """Add the tokens that end what a model fills in to fields for SamplingParams.from_dict."""
    if frontend.infill is not None and not sampling.get("ignore_eos"):
        sampling["stop_token_ids"] = [*sampling.get("stop_token_ids", ()), *frontend.infill.end_ids]


def structure_of(kind: str, schema: dict[str, Any] | None, name: str) -> StructuredOutputsParams:
    """Return the structure that a format of this kind asks for. `name` is the field that holds it."""
    if kind not in ("json_object", "json_schema", "json"):
        hint = "known are text, json_object and json_schema; structured_outputs takes more"
        raise RequestError(f"{name} of type {kind[:64]!r} is not supported", hint, name)
    if kind == "json_object" and not schema:
        return StructuredOutputsParams(json_object=True)
    if schema is None:
        raise RequestError(f"{name} lacks its schema", 'such as {"type": "object"}', name)
    return StructuredOutputsParams(json=schema)


def response_warnings(request: Request, unknown: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Return the warnings of a response: unknown fields, then `others`. They are logged as well."""
    unknown = [name for name in unknown if not name.startswith(IGNORED_PREFIX)]
    warnings = [f"unknown field {name[:MAX_NAME]!r} has no effect" for name in unknown[:MAX_WARNINGS]]
    if len(unknown) > MAX_WARNINGS:
        warnings.append(f"{len(unknown) - MAX_WARNINGS:,} more unknown fields have no effect")
    warnings += others
    if warnings:
        request.state.warnings = warnings
    return warnings


def prompt_list(prompt: str | list[Any], n: int) -> list[str | int | list[int]]:
    """Return the prompts of a request as a list. Raises RequestError when there are none, or too many."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts: list[Any] = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise RequestError("prompt is an empty list", "give at least one prompt", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{len(prompts):,} prompts are more than {MAX_PROMPTS:,}", None, "prompt")
    if len(prompts) * n > MAX_CHOICES:
        problem = f"{len(prompts):,} prompts with {n} choices each are more than {MAX_CHOICES:,} choices"
        raise RequestError(problem, "send several requests", "n")
    return prompts
