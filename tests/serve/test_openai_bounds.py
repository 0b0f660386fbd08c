"""Every field of both endpoints with values from outside: refused at once, and nobody else notices."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai_client import CHAT, COMPLETIONS, MESSAGES, chat
from outside_values import VALUES, replaced
from server import Server

from quire.errors import RequestError
from quire.server.body import parse
from quire.server.openai.chat import task_of
from quire.server.openai.protocol import ChatRequest, CompletionRequest
from quire.server.unsupported_fields import IGNORED, OFF_FROM, REFUSED

LIMIT_S = 1.0  # a machine that does nothing else takes a tenth of it
UNTYPED = {*REFUSED, *IGNORED} - {"best_of", "metadata"}  # which are all read alike
FIELDS = {
    CHAT: [f.encode_name for f in msgspec.structs.fields(ChatRequest) if f.name not in UNTYPED],
    COMPLETIONS: [f.encode_name for f in msgspec.structs.fields(CompletionRequest) if f.name not in UNTYPED],
}
BASE = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "Once", "max_tokens": 1},
}


class Canary:
    """A stream that is asked for again and again while others misbehave; every time it must be the same."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self.answers: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            body = {"messages": MESSAGES, "seed": 1, "max_tokens": 100, "ignore_eos": True, "stream": True}
            with self._client.stream("POST", CHAT, json=body) as reply:
                assert reply.status_code == 200, reply.read()
                lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
            deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
            self.answers.append("".join(delta.get("content", "") for delta in deltas))

    def stop(self) -> list[str]:
        self._stop.set()
        self._thread.join()
        self._client.close()
        return self.answers


@pytest.fixture(scope="module")
def canary(server: Server) -> Iterator[Canary]:
    with server.client() as client:
        expected = chat(client, seed=1, max_tokens=100, ignore_eos=True)
    canary = Canary(server)
    yield canary
    answers = canary.stop()
    assert answers
    assert set(answers) == {expected["choices"][0]["message"]["content"]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", VALUES)
def test_every_field_with_values_from_outside(
    client: httpx.Client, canary: Canary, path: str, value: str
) -> None:
    for field in FIELDS[path]:
        body = replaced(BASE[path], field, VALUES[value])
        begin = time.perf_counter()
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        elapsed_s = time.perf_counter() - begin
        statuses = (200, 400, 404) if field == "model" else (200, 400)
        assert reply.status_code in statuses, (field, value, reply.text)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] in ("invalid_request_error", "not_found_error")
            assert len(error["message"]) < 1000
            assert elapsed_s < LIMIT_S, (field, elapsed_s)
        else:
            assert value not in ("NaN", "Infinity", "1e309", "nested"), field


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_what_is_refused_is_refused_in_any_form(field: str) -> None:
    for value in ("x", 0.5 if field in OFF_FROM else 3.5, {"a": 1}, ["a"]):
        body = {"messages": MESSAGES, "presence_penalty": 1, field: value}
        asked, _ = parse(json.dumps(body).encode(), ChatRequest)
        with pytest.raises(RequestError) as caught:
            task_of(asked)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129),
        ("n", 0),
        ("temperature", 2.1),
        ("top_p", 0),
        ("max_tokens", 1 << 31),
        ("min_tokens", 2),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop_token_ids", [2048]),
        ("stop_token_ids", [-1]),
        ("bad_words", ["x"] * 129),
        ("logit_bias", {"2048": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [2048]),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("priority", 1 << 40),
        ("cache_salt", "x" * 129),
        ("cache_salt", "a@b"),
        ("cache_salt", "a\x00b"),
        ("truncate_prompt_tokens", -2),
        ("user", "x" * 2000),
        ("prompt_logprobs", 21),
        ("repetition_penalty", 0),
        ("presence_penalty", -2.1),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ranges(client: httpx.Client, path: str, field: str, value: Any) -> None:
    reply = client.post(path, json={**BASE[path], field: value})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


NUMBERS, NAMES = "1," * 1_100_000 + "1", ",".join(f'"{i}":1' for i in range(600_000))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("allowed_token_ids", f"[{NUMBERS}]", "1,000,000 values and names"),
        (
            "messages",
            f'[{{"role": "user", "content": "x", "tool_calls": [{{"a": [{NUMBERS}]}}]}}]',
            "1,000,000",
        ),
        ("logit_bias", f"{{{NAMES}}}", "1,000,000 values and names"),
        ("unknown", f"{{{NAMES}}}", "1,000,000 values and names"),
        ("stop", "[" + '"a",' * 1_100_000 + '"b"]', "1,000,000 values and names"),
        ("stop", "[" + '"\\\\",' * 1_100_000 + '"b"]', "1,000,000 values and names"),
        ("tools", "[" + "{}," * 400_000 + "{}]", "400,000 lists and objects"),
        ("tools", "[" + "[]," * 400_000 + "[]]", "400,000 lists and objects"),
    ],
)
def test_too_many_values_are_not_decoded(field: str, value: str, problem: str) -> None:
    """No stream advances while a body is decoded."""
    body = json.dumps(BASE[CHAT])[:-1] + f', "{field}": {value}}}'
    with pytest.raises(RequestError, match=f"the body contains more than {problem}"):
        parse(body.encode(), ChatRequest)


@pytest.mark.parametrize("text", ["{}[],:", '\\"', "\\", '"],', '\\\\",', "é\n"])
def test_what_strings_contain_is_not_counted(text: str) -> None:
    prompt = text * 400_000
    asked, _ = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert asked.prompt == prompt


def test_long_fields_are_read() -> None:
    ids = list(range(100, 1000)) * 1000
    asked, unknown = parse(json.dumps({"prompt": ids, "x": "y" * 3_000_000}).encode(), CompletionRequest)
    assert (asked.prompt, unknown) == (ids, ["x"])


def test_numbers_that_are_slow_to_read_keep_their_value() -> None:
    """msgspec takes 10 µs for each of these, where no Python float() is called instead."""
    numbers = [5e-324, 1e-310, 1.2345678901234568e-301, 9007199254740993.0, 1.5]
    biases = {str(i): number for i, number in enumerate(numbers)}
    body = json.dumps(BASE[CHAT] | {"logit_bias": biases, "metadata": numbers})
    asked, _ = parse(body.encode(), ChatRequest)
    assert (asked.logit_bias, asked.metadata) == (biases, numbers)


def test_a_body_that_is_no_object(client: httpx.Client) -> None:
    for body in (b"[]", b"1", b"null", b'"x"', b"", b"{", b"\xff", b'{"messages": [}'):
        for path in (CHAT, COMPLETIONS):
            reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
