"""Tools whose schemas no grammar can follow: the request is served, warnings name what is not enforced."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server import Server

ASKED = "What is the weather in Rome?"
ODD = {
    "type": "dict",
    "properties": {"city": {"type": "str", "pattern": "^(?!x)"}, "days": {"type": "int", "maximum": 1e30}},
    "required": ["city", "days", "elsewhere"],
}
GIVEN = {"name": "get_weather", "description": "The weather", "parameters": ODD}
SAID = (
    "tool get_weather: type of the parameters is 'dict', which is taken as object",
    "tool get_weather: type of 'city' is 'str', which is taken as string",
    "tool get_weather: pattern of 'city' is not enforced: it is more than a regular expression",
    "tool get_weather: type of 'days' is 'int', which is taken as integer",
    "tool get_weather: maximum of 'days' is not enforced: it is too large or too small",
    "tool get_weather: required of the parameters names 'elsewhere', which is not among its properties",
)
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": GIVEN}],
        "tool_choice": "required",
        "max_tokens": 200,
    },
    "/v1/responses": {
        "input": ASKED,
        "tools": [{"type": "function", **GIVEN}],
        "tool_choice": "required",
        "max_output_tokens": 200,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"name": "get_weather", "input_schema": ODD}],
        "tool_choice": {"type": "any"},
        "max_tokens": 200,
    },
}


def arguments_of(path: str, reply: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/messages":
        found: dict[str, Any] = reply["content"][-1]["input"]
        return found
    call = reply["output"][-1] if path == "/v1/responses" else reply["choices"][0]["message"]["tool_calls"][0]
    written: dict[str, Any] = json.loads(call.get("function", call)["arguments"])
    return written


@pytest.mark.parametrize("path", REQUESTS)
def test_a_tool_that_no_grammar_can_follow_is_loosened(client: httpx.Client, path: str) -> None:
    reply = client.post(path, json=REQUESTS[path] | {"temperature": 0}).json()
    assert tuple(reply["warnings"]) == SAID
    arguments = arguments_of(path, reply)
    assert isinstance(arguments.pop("city"), str)
    assert isinstance(arguments.pop("days"), int)
    assert not arguments
    stream = client.post(path, json=REQUESTS[path] | {"stream": True}).text
    assert all(json.dumps(warning)[1:-1] in stream for warning in SAID)


def test_a_strict_tool_is_refused_by_its_name(client: httpx.Client) -> None:
    strict = {
        "type": "function",
        "function": GIVEN | {"parameters": {"type": "object", "not": {}}, "strict": True},
    }
    plain = {"type": "function", "function": {"name": "now"}}
    body = REQUESTS["/v1/chat/completions"] | {"tools": [plain, strict]}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert 'keywords that cannot be enforced: "not"' in error["message"]


def test_too_many_alternatives_are_an_error_of_the_request(client: httpx.Client, server: Server) -> None:
    """The error appears after the first token."""
    pairs = " | ".join(f"a{i} b{j}" for i in range(105) for j in range(105))
    rules = "\n".join(f'a{i}: "{i}a"\nb{i}: "{i}b"' for i in range(105))
    grammar = f'start: "x" ({pairs})\n{rules}'
    body = {"prompt": "Hi", "max_tokens": 20, "structured_outputs": {"grammar": grammar}}
    whole, stream = (client.post("/v1/completions", json=body | {"stream": one}) for one in (False, True))
    assert whole.status_code == 400
    text = stream.text  # as a whole, unless the stream had begun
    if stream.status_code == 200:
        text = text.removesuffix("\n\ndata: [DONE]\n\n").rpartition("data: ")[2]
    for error in (whole.json()["error"], json.loads(text)["error"]):
        assert error["type"] == "invalid_request_error"
        assert "it has too many alternatives at one place" in error["message"]
    assert client.get("/health").status_code == 200


def test_errors_name_no_internals(client: httpx.Client) -> None:
    schemas: dict[str, dict[str, Any]] = {
        "oneOf: its alternatives may overlap": {"oneOf": [{"type": "string"}, {"type": "string"}]},
        "minimum, maximum: these bounds": {"type": "number", "maximum": 1e30},
        "type: int is not a JSON type": {"type": "int"},
        "$ref: /$defs/lost does not exist": {"$ref": "#/$defs/lost"},
        "pattern: ^ and $": {"type": "string", "pattern": "a^b"},
    }
    for words, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form}
        reply = client.post("/v1/chat/completions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "response_format")
        assert words in error["message"]
        assert not any(
            inside in error["message"] for inside in ("coerce", "regex for", "line 1", "lookarounds")
        )
