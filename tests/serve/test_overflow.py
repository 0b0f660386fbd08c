"""A prompt longer than the context is refused in the words by which agents know to shorten theirs."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import httpx
import openai
import pytest
from server import Server

from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.errors import ContextOverflow, RequestError
from quire.sampling_params import SamplingParams
from quire.text.chat_template import MAX_CHARACTERS
from quire.types import NewRequest

BODIES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 5},
}
OPENAI = re.compile(
    r"This model's maximum context length is 1024 tokens\. However, your prompt has (.+) tokens( or more)?\. "
    r"Please reduce the length of the (\w+)\."
)
ANTHROPIC = re.compile(r"prompt is too long: (.+) tokens( or more)? > 1023 maximum")
TEXTS = {
    "tokenized": ("dragon " * 9000, r"\d{4,5}"),
    "not tokenized": ("x" * (256 * 1024 + 100), r"at least 10\d\d"),
    "not rendered": ("x" * (MAX_CHARACTERS + 1), "about 2097152"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", TEXTS)
def test_every_endpoint_says_it(client: httpx.Client, path: str, kind: str, stream: bool) -> None:
    text, size = TEXTS[kind]
    if path == "/v1/completions" and kind == "not rendered":
        size = r"at least 3\d{4}"
    reply = client.post(path, json={**BODIES[path](text), "stream": stream})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        found = ANTHROPIC.fullmatch(error["message"])
        assert error.keys() == {"type", "message"}
    else:
        found = OPENAI.fullmatch(error["message"])
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == {"completions": "prompt", "responses": "input"}.get(
            path.removeprefix("/v1/"), "messages"
        )
    assert found, error
    assert re.fullmatch(size, found[1])
    if path != "/v1/messages":
        assert found[3] == ("prompt" if path == "/v1/completions" else "messages")


def test_token_ids_are_counted(client: httpx.Client) -> None:
    for add_special_tokens in (True, False):
        body = {"prompt": [[5] * 1024], "add_special_tokens": add_special_tokens}
        message = client.post("/v1/completions", json=body).json()["error"]["message"]
        assert "your prompt has 1024 tokens" in message
    body = {"prompt": "x" * (256 * 1024 + 100), "add_special_tokens": False}
    assert "at least" in client.post("/v1/completions", json=body).json()["error"]["message"]


def test_an_answer_takes_the_room_that_there_is(client: httpx.Client) -> None:
    """More tokens asked for than fit are no error: the answer ends for length."""
    body = {"prompt": [5] * 1020, "max_tokens": 5000, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["choices"][0]["finish_reason"] == "length"


def test_the_clients_of_both_find_it(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk:
        long: Any = [{"role": "user", "content": "dragon " * 9000}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as caught:
            sdk.chat.completions.create(model="demo", messages=long)
        assert caught.value.code == "context_length_exceeded"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1023 maximum"),
    ):
        other.messages.create(model="demo", max_tokens=9, messages=long)


def test_the_engine_says_the_same() -> None:
    limits = RequestLimits(max_model_len=32, groups=(BlockGroup(4),), block_size=4, num_batched_tokens=16)
    with pytest.raises(ContextOverflow) as caught:
        limits.check(NewRequest("a", (1,) * 9008, SamplingParams()))
    assert caught.value.message == (
        "This model's maximum context length is 32 tokens. However, your prompt has 9008 tokens. "
        "Please reduce the length of the prompt."
    )
    assert caught.value.anthropic == "prompt is too long: 9008 tokens > 31 maximum"
    with pytest.raises(RequestError, match=r"32 tokens \(10 in the prompt, 22 in the comp") as other:
        limits.check(NewRequest("a", (1,) * 10, SamplingParams(max_tokens=None)))
    assert other.value.code == "context_length_exceeded"
