"""Errors as HTTP answers: a status, and a body in the shape of the interface whose path was asked for.

An answer says what the caller can use and nothing of the inside: what was not raised on purpose becomes a
500 that says only so, and every text loses file paths, addresses and traceback lines on its way out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.errors import ContextOverflow, EngineDead, Overloaded, QuireError, RequestError

UNEXPECTED = "the server failed at this request; its log says why"
RESTART_S = 5  # when to ask again after the engine has died
MAX_MESSAGE = 4096  # characters of an error's text that are sent

# status -> (type, code) where the error itself names none
_KINDS = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    421: ("invalid_request_error", "unknown_host"),
    426: ("invalid_request_error", "upgrade_refused"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    501: ("server_error", "not_implemented"),
    503: ("overloaded_error", "server_overloaded"),
}
# Anthropic's names for the types, where they differ
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error"}
_ANTHROPIC_CODES = ("thread_unsupported_request",)  # those that its client goes by
# llama.cpp's names for the types, where they differ
_LLAMACPP_TYPES = {403: "permission_error", 501: "not_supported_error", 503: "unavailable_error"}
_LLAMACPP_PATHS = frozenset({"/completion", "/completions", "/props", "/slots", "/apply-template", "/infill"})

_ROOTS = (
    "home",
    "root",
    "usr",
    "opt",
    "var",
    "tmp",
    "etc",
    "mnt",
    "srv",
    "proc",
    "dev",
    "run",
    "lib",
    "data",
    "Users",
)
_OWN = {path.parts[1] for path in (Path(__file__), Path(sys.prefix), Path.home()) if len(path.parts) > 1}
_ROOT = "|".join(map(re.escape, sorted({*_ROOTS, *_OWN})))
_INSIDES = (
    (re.compile(r'File "[^"\n]*", line \d+(?:, in [\w.<>]+)?'), "[source]"),
    (re.compile(rf"(?<![\w.])(?:/(?:{_ROOT})|~|[A-Za-z]:)[/\\][^\s'\"`,;:()<>\[\]]*"), "[path]"),
    (re.compile(r"(?: at)? 0x[0-9a-fA-F]{4,}"), ""),
)


class HTTPRefusal(QuireError):
    """A request that is refused with the HTTP `status` given, and `headers` beside the usual ones."""

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
    """What a request names is not here: 404, with the code "model_not_found" for a model."""

    def __init__(
        self, message: str, hint: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(404, message, hint, param=param, code=code)


class Answer(NamedTuple):
    """What is told of an error: all that both shapes are made of."""

    status: int
    message: str
    type: str
    code: str
    param: str | None
    headers: dict[str, str]


def answer(error: BaseException) -> Answer:
    """Status and words for an error. One that was not raised on purpose says nothing of itself."""
    status, headers, message = 500, {}, UNEXPECTED
    if isinstance(error, RequestError):
        status = 400
    elif isinstance(error, HTTPRefusal):
        status, headers = error.status, error.headers
    elif isinstance(error, Overloaded):
        status, headers = 503, {"Retry-After": str(max(1, round(error.retry_after_s)))}
    elif isinstance(error, EngineDead) and error.retry:
        status, headers = 503, {"Retry-After": str(RESTART_S)}
    elif isinstance(error, EngineDead):
        headers = {"x-should-retry": "false"}  # which the SDKs of OpenAI and Anthropic heed
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        message = error.detail
    if isinstance(error, QuireError):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
    type_, code = _KINDS.get(status, _KINDS[400] if status < 500 else _KINDS[500])
    if isinstance(error, EngineDead):
        type_, code = "server_error", "engine_dead"
    code = getattr(error, "code", None) or code
    return Answer(status, clean(message), type_, code, getattr(error, "param", None), headers)


@lru_cache(64)  # those who are refused for one reason are many
def clean(text: str) -> str:
    """A text without file paths, addresses and lines of tracebacks, that can be sent as UTF-8."""
    text = text[:MAX_MESSAGE].encode("utf-8", "replace").decode()
    for pattern, instead in _INSIDES:
        text = pattern.sub(instead, text)
    return text[:MAX_MESSAGE]


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's shape, for a response and for the event that ends a stream."""
    told = answer(error)
    words = {"message": told.message, "type": told.type, "param": told.param, "code": told.code}
    return {"error": words}


def anthropic_body(error: BaseException) -> dict[str, Any]:
    """Anthropic's shape, likewise."""
    told = answer(error)
    type_ = _ANTHROPIC_TYPES.get(told.status, told.type)
    if type_ == "server_error":
        type_ = "api_error"
    message = error.anthropic if isinstance(error, ContextOverflow) else told.message
    words: dict[str, Any] = {"type": type_, "message": message}
    if told.code in _ANTHROPIC_CODES:
        words["details"] = {"error_code": told.code}
    return {"type": "error", "error": words}


def ollama_body(error: BaseException) -> dict[str, Any]:
    """Ollama's shape, likewise."""
    return {"error": answer(error).message}


def llamacpp_body(error: BaseException) -> dict[str, Any]:
    """llama.cpp's shape, likewise; its code is the status."""
    told = answer(error)
    type_ = _LLAMACPP_TYPES.get(told.status, told.type)
    if told.code == "context_length_exceeded":
        type_ = "exceed_context_size_error"
    return {"error": {"code": told.status, "message": told.message, "type": type_}}


_BODIES: dict[str, Callable[[BaseException], dict[str, Any]]] = {
    "openai": error_body,
    "anthropic": anthropic_body,
    "ollama": ollama_body,
    "llamacpp": llamacpp_body,
}


def interface_of(path: str) -> str:
    """Whose interface a path belongs to: one of "openai", "anthropic", "ollama", "llamacpp"."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    return "llamacpp" if path in _LLAMACPP_PATHS or path.startswith("/slots/") else "openai"


def response_for(error: BaseException, path: str = "") -> Response:
    """The response that tells an error to who asked for `path`."""
    told = answer(error)
    body = _BODIES[interface_of(path)](error)
    return Response(json.dumps(body), told.status, told.headers, "application/json")


def written(error: BaseException, path: str = "") -> tuple[bytes, bytes]:
    """That response as bytes: the head without the line that ends it, and the body."""
    response = response_for(error, path)
    line = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return line + headers, bytes(response.body)
