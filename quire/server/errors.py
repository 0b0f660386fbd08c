"""Errors as HTTP responses: a status, and a body in the shape of the interface whose path was requested.

A response says what the caller can do about the error and nothing about internals: an exception that was not
raised on purpose becomes a 500 that says only so, and every message loses file paths, addresses and traceback
lines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.environment import home_folder
from quire.errors import Conflict, ContextOverflow, EngineDead, Overloaded, QuireError, RequestError

UNEXPECTED = "the server failed to process this request; its log has the details"
RESTART_S = 5  # Retry-After when the engine has died
MAX_MESSAGE = 4096  # characters of an error's text that are sent


class GenerationFailed(QuireError):
    """A request failed while it ran, and no other did: NaN logits, or a grammar that could not continue."""


# status -> (type, code) of errors that have none of their own
_KINDS = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    421: ("invalid_request_error", "unknown_host"),
    426: ("invalid_request_error", "upgrade_refused"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    501: ("server_error", "not_implemented"),
    503: ("overloaded_error", "server_overloaded"),
}
# Anthropic's types where they differ
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error"}
_ANTHROPIC_CODES = ("thread_unsupported_request",)  # those that its clients check
# llama.cpp's types where they differ
_LLAMACPP_TYPES = {403: "permission_error", 501: "not_supported_error", 503: "unavailable_error"}
_LLAMACPP_PATHS = frozenset({"/completion", "/completions", "/props", "/slots", "/apply-template", "/infill"})

_ROOTS = "home|root|usr|opt|var|tmp|etc|mnt|srv|proc|dev|run|lib|data|Users"
_OWN = {path.parts[1] for path in (Path(__file__), Path(sys.prefix), home_folder()) if len(path.parts) > 1}
_ROOT = "|".join((_ROOTS, *map(re.escape, sorted(_OWN))))
_INTERNALS = (
    (re.compile(r'File "[^"\n]*", line \d+(?:, in [\w.<>]+)?'), "[source]"),
    (re.compile(rf"(?<![\w.])(?:/(?:{_ROOT})|~|[A-Za-z]:)[/\\][^\s'\"`,;:()<>\[\]]*"), "[path]"),
    (re.compile(r"(?: at)? 0x[0-9a-fA-F]{4,}"), ""),
)


class HTTPRefusal(QuireError):
    """A request that is refused with an HTTP `status` and, in addition to the usual ones, `headers`."""

    def __init__(
        self,
        status: int,
        message: str,
        hint: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class NotFound(HTTPRefusal):
    """Something that a request names does not exist: 404, with the code "model_not_found" for a model."""

    def __init__(
        self, message: str, hint: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(404, message, hint, param=param, code=code)


class ErrorReport(NamedTuple):
    """The content of an error response, from which the bodies of all interfaces are made."""

    status: int
    message: str
    type: str
    code: str
    param: str | None
    headers: dict[str, str]


def report(error: BaseException) -> ErrorReport:
    """Return the status and content for an error; nothing about one that was not raised on purpose."""
    status, headers, message = 500, {}, UNEXPECTED
    if isinstance(error, RequestError):
        status = 400
    elif isinstance(error, HTTPRefusal):
        status, headers = error.status, error.headers
    elif isinstance(error, Conflict):
        status = 409
    elif isinstance(error, Overloaded):
        status, headers = 503, {"Retry-After": str(max(1, round(error.retry_after_s)))}
    elif isinstance(error, EngineDead) and error.retry:
        status, headers = 503, {"Retry-After": str(RESTART_S)}
    elif isinstance(error, EngineDead):
        headers = {"x-should-retry": "false"}  # read by the SDKs of OpenAI and Anthropic
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        message = error.detail
    if isinstance(error, QuireError):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
    type_, code = _KINDS.get(status, _KINDS[400] if status < 500 else _KINDS[500])
    if isinstance(error, EngineDead):
        type_, code = "server_error", "engine_dead"
    code = getattr(error, "code", None) or code
    return ErrorReport(status, clean(message), type_, code, getattr(error, "param", None), headers)


@lru_cache(64)  # under overload many requests get the same error
def clean(text: str) -> str:
    """Remove file paths, addresses and traceback lines from a text, and what cannot be sent as UTF-8."""
    text = text[:MAX_MESSAGE].encode("utf-8", "replace").decode()
    for pattern, replacement in _INTERNALS:
        text = pattern.sub(replacement, text)
    return text[:MAX_MESSAGE]


class ErrorDetail(Struct):
    """Description of an error, in words and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """Body of an error in OpenAI's interface, and at paths of none."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: BaseException) -> ErrorBody:
        found = report(error)
        return cls(ErrorDetail(found.message, found.type, found.param, found.code))


class AnthropicErrorDetail(Struct):
    """Description of an error; `details` has its code where clients check it."""

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class AnthropicErrorBody(Struct):
    """Body of an error under /v1/messages; `type` is "error"."""

    type: str
    error: AnthropicErrorDetail

    @classmethod
    def of(cls, error: BaseException) -> AnthropicErrorBody:
        found = report(error)
        type_ = _ANTHROPIC_TYPES.get(found.status, found.type)
        if type_ == "server_error":
            type_ = "api_error"
        message = error.anthropic if isinstance(error, ContextOverflow) else found.message
        details = {"error_code": found.code} if found.code in _ANTHROPIC_CODES else UNSET
        return cls("error", AnthropicErrorDetail(type_, message, details))


class OllamaErrorBody(Struct):
    """Body of an error under /api/."""

    error: str

    @classmethod
    def of(cls, error: BaseException) -> OllamaErrorBody:
        return cls(report(error).message)


class LlamacppErrorDetail(Struct):
    """Description of an error; `code` is the HTTP status."""

    code: int
    message: str
    type: str


class LlamacppErrorBody(Struct):
    """Body of an error of llama.cpp's endpoints."""

    error: LlamacppErrorDetail

    @classmethod
    def of(cls, error: BaseException) -> LlamacppErrorBody:
        found = report(error)
        type_ = _LLAMACPP_TYPES.get(found.status, found.type)
        if found.code == "context_length_exceeded":
            type_ = "exceed_context_size_error"
        return cls(LlamacppErrorDetail(found.status, found.message, type_))


AnyErrorBody: TypeAlias = ErrorBody | AnthropicErrorBody | OllamaErrorBody | LlamacppErrorBody
ERROR_BODIES: dict[str, type[AnyErrorBody]] = {
    "openai": ErrorBody,
    "anthropic": AnthropicErrorBody,
    "ollama": OllamaErrorBody,
    "llamacpp": LlamacppErrorBody,
}


def interface_of(path: str) -> str:
    """Return the interface that a path belongs to, a key of ERROR_BODIES."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    return "llamacpp" if path in _LLAMACPP_PATHS or path.startswith("/slots/") else "openai"


def response_for(error: BaseException, path: str = "") -> Response:
    """Return the response for an error of a request to `path`."""
    body = msgspec.json.encode(ERROR_BODIES[interface_of(path)].of(error))
    found = report(error)
    return Response(body, found.status, found.headers, "application/json")


def raw_response(error: BaseException, path: str = "") -> tuple[bytes, bytes]:
    """Return that response as bytes: the head without the empty line that ends it, and the body."""
    response = response_for(error, path)
    line = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return line + headers, bytes(response.body)
