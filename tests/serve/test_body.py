"""Bodies that cannot be read: the one error says what is wrong with the bytes, and where."""

from __future__ import annotations

import json

import httpx
import pytest

from quire.errors import RequestError
from quire.server.body import SEARCHED_BYTES, parse
from quire.server.openai.protocol import ChatRequest, CompletionRequest

HALF = r"contains a lone surrogate \ud800, which is not a character"
JSON = {"Content-Type": "application/json"}


def why(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, ChatRequest)
    return caught.value


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        (b'{"messages": [], "user": "\xff"}', 26),
        (b'{"model": "a", "\xc3(": 1}', 16),
        (b'{"messages": [], "user": "ab\xed\xa0\x80"}', 28),  # half a pair, encoded by itself
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', 46),
        ('{"messages": []}'.encode("utf-16"), 0),
        (b'{"messages": [], "x": "\xf0\x9f\x98', 23),
    ],
)
def test_what_is_not_utf_8(body: bytes, byte: int) -> None:
    assert why(body).message == f"the body is not valid UTF-8 at byte {byte}"


@pytest.mark.parametrize(
    ("body", "where", "param"),
    [
        (r'{"messages": [{"role": "user", "content": "a\ud800"}]}', "messages[0].content", "messages"),
        (r'{"messages": [{"content": [{"text": "\ud800b"}]}]}', "messages[0].content[0].text", "messages"),
        (r'{"messages": [], "stop": ["a", "\ud800\ud800"]}', "stop[1]", "stop"),
        (r'{"messages": [], "user": "\ud800\u0041"}', "user", "user"),
        (r'{"messages": [], "mine": {"\ud800": 1}}', "mine", "mine"),
        (r'{"\ud800": 1}', "the body", None),
        (r'"\ud800"', "the body", None),
    ],
)
def test_half_a_surrogate_pair(body: str, where: str, param: str | None) -> None:
    error = why(body.encode())
    assert error.message == f"{where} {HALF}"
    assert error.param == param


def test_the_other_half_is_named() -> None:
    assert r"user contains a lone surrogate \udc80" in why(rb'{"messages": [], "user": "a\udc80"}').message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [',
        rb'{"messages": ["\\ud800"',
        rb'{"messages": [], "user": "\ud8"}',
        rb'{"messages": "\ud800',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
    ],
)
def test_what_is_not_json(body: bytes) -> None:
    assert why(body).message.startswith("the body is not JSON: ") or b"[[" in body


def test_whole_pairs_and_what_reads_like_a_half_are_taken() -> None:
    text = "\U0001f600 and \\ud800"
    asked, _ = parse(json.dumps({"prompt": text}).encode(), CompletionRequest)
    assert asked.prompt == text


def test_a_large_body_is_not_searched() -> None:
    """Nobody waits for it: the rest of the server stands still while one looks."""
    for size, words in ((SEARCHED_BYTES // 2, "prompt " + HALF), (SEARCHED_BYTES, "the body is not JSON")):
        with pytest.raises(RequestError) as caught:
            parse(b'{"prompt": "' + b"x" * size + rb'\ud800"}', CompletionRequest)
        assert caught.value.message.startswith(words)


def test_every_endpoint_says_so(client: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        for body, words in (
            (rb'{"model": "\ud800"}', "model " + HALF),
            (b'"\xff', "not valid UTF-8 at byte 1"),
        ):
            reply = client.post(path, content=body, headers=JSON)
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]


def test_arguments_of_a_call(client: httpx.Client) -> None:
    """JSON in a text of the JSON."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    reply = client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1})
    assert reply.status_code == 400, reply.text
    assert "surrogate" in reply.json()["error"]["message"]
