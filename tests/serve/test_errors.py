"""Errors as clients see them: status, shape, and nothing of the inside."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from starlette.exceptions import HTTPException

from quire.errors import EngineDead, Overloaded, QuireError, RequestError
from quire.server.errors import (
    MAX_MESSAGE,
    UNEXPECTED,
    AnthropicErrorBody,
    ErrorBody,
    HTTPRefusal,
    NotFound,
    clean,
    response_for,
)

LONG = RequestError("the prompt is too long", "shorten it", "prompt", "context_length_exceeded")
CASES = [
    (LONG, 400, "invalid_request_error", "context_length_exceeded", "prompt", "invalid_request_error"),
    (RequestError("no"), 400, "invalid_request_error", "invalid_request", None, "invalid_request_error"),
    (
        NotFound("no such model", None, "model", "model_not_found"),
        *(404, "not_found_error", "model_not_found", "model", "not_found_error"),
    ),
    (HTTPRefusal(401, "no"), 401, "authentication_error", "invalid_api_key", None, "authentication_error"),
    (HTTPRefusal(413, "no"), 413, "invalid_request_error", "request_too_large", None, "request_too_large"),
    (HTTPRefusal(418, "no"), 418, "invalid_request_error", "invalid_request", None, "invalid_request_error"),
    (Overloaded("full"), 503, "overloaded_error", "server_overloaded", None, "overloaded_error"),
    (EngineDead("gone"), 503, "server_error", "engine_dead", None, "api_error"),
    (QuireError("failed"), 500, "server_error", "internal_error", None, "api_error"),
    (ValueError("/opt/models/secret.py"), 500, "server_error", "internal_error", None, "api_error"),
    (HTTPException(405), 405, "invalid_request_error", "method_not_allowed", None, "invalid_request_error"),
]


@pytest.mark.parametrize(("error", "status", "type_", "code", "param", "anthropic"), CASES)
def test_both_shapes(
    error: Exception, status: int, type_: str, code: str, param: str | None, anthropic: str
) -> None:
    told = msgspec.to_builtins(ErrorBody.of(error))["error"]
    assert (told["type"], told["code"], told["param"]) == (type_, code, param)
    assert response_for(error).status_code == status
    assert json.loads(response_for(error, "/v1/messages").body) == {
        "type": "error",
        "error": {"type": anthropic, "message": told["message"]},
    }
    assert json.loads(response_for(error, "/v1/completions").body) == {"error": told}


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (LONG, 400, "exceed_context_size_error"),
        (RequestError("no"), 400, "invalid_request_error"),
        (HTTPRefusal(401, "no"), 401, "authentication_error"),
        (NotFound("no such model", code="model_not_found"), 404, "not_found_error"),
        (HTTPRefusal(501, "no"), 501, "not_supported_error"),
        (Overloaded("full"), 503, "unavailable_error"),
        (ValueError("/opt/models/secret.py"), 500, "server_error"),
    ],
)
def test_shapes_of_llamacpp_and_ollama(error: Exception, status: int, type_: str) -> None:
    message = ErrorBody.of(error).error.message
    for path in ("/completion", "/completions", "/props", "/slots", "/slots/1", "/apply-template", "/infill"):
        response = response_for(error, path)
        told = {"error": {"code": status, "message": message, "type": type_}}
        assert (response.status_code, json.loads(response.body)) == (status, told)
    for path in ("/api/chat", "/api/nothing"):
        response = response_for(error, path)
        assert (response.status_code, json.loads(response.body)) == (status, {"error": message})


def test_hints_are_told() -> None:
    assert ErrorBody.of(LONG).error.message == "the prompt is too long (shorten it)"


def test_when_to_come_back() -> None:
    assert response_for(Overloaded("full", None, 7)).headers["retry-after"] == "7"
    assert int(response_for(EngineDead("gone")).headers["retry-after"]) > 0
    assert "retry-after" not in response_for(LONG).headers


def test_what_kills_is_not_sent_again() -> None:
    reply = response_for(EngineDead("gone", retry=False))
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")
    assert "retry-after" not in reply.headers


def test_headers_of_an_error_are_kept() -> None:
    assert response_for(HTTPException(405, headers={"Allow": "GET"})).headers["allow"] == "GET"


def test_what_was_not_raised_on_purpose_says_nothing() -> None:
    assert ErrorBody.of(KeyError("weights")).error.message == UNEXPECTED
    assert AnthropicErrorBody.of(KeyError("weights")).error.message == UNEXPECTED


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("cannot read /opt/models/model/config.json: gone", "cannot read [path]: gone"),
        ("'/usr/lib/python3/x.py'", "'[path]'"),
        ("~/models/x and C:\\Users\\me\\x", "[path] and [path]"),
        ('File "/opt/a.py", line 3, in run', "[source]"),
        ("<object at 0x7f00aa11bb22> failed", "<object> failed"),
        ("half a \ud83d pair", "half a ? pair"),
    ],
)
def test_insides_are_removed(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_the_folder_of_the_package_is_removed() -> None:
    assert clean(f"in {__file__}") == "in [path]"


@pytest.mark.parametrize(
    "text",
    ["see /v1/models", "/properties/a/type is unknown", "http://example.org/usr/bin", "3/4 of 0x10", "a ~ b"],
)
def test_the_rest_stays(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize("piece", ["/home", "/home/", '"File "', "~/", "0x", " at", "C:\\"])
def test_cleaning_takes_little_time(piece: str) -> None:
    begin = time.monotonic()
    assert len(clean(piece * 1_000_000)) <= MAX_MESSAGE
    assert time.monotonic() - begin < 0.5
