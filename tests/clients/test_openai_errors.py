"""What the openai package raises, and what it tries again, when the server refuses, is full or fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from requests_over_http import idle, wait_for
from server import Server, running

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
openai = pytest.importorskip("openai")

PROMPT: Any = {"model": "demo", "prompt": "Once upon a time"}
LONG: Any = {**PROMPT, "max_tokens": 1000, "temperature": 2, "extra_body": {"ignore_eos": True}}


def client_of(server: Server, **options: Any) -> Any:
    return openai.OpenAI(**{"base_url": f"{server.url}/v1", "api_key": "any", "max_retries": 0, **options})


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize(
    ("kind", "code", "param", "asked"),
    [
        ("BadRequestError", "invalid_request", "temperature", {"temperature": 9}),
        ("BadRequestError", "unsupported_parameter", "suffix", {"suffix": "x"}),
        ("BadRequestError", "context_length_exceeded", "prompt", {"prompt": [5] * 2000}),
        ("NotFoundError", "model_not_found", "model", {"model": "gpt-2"}),
    ],
)
def test_what_is_refused(client: Any, kind: str, code: str, param: str, asked: Any) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.completions.create(**PROMPT | asked)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id
    assert param in caught.value.message or "tokens" in caught.value.message


def test_a_body_that_is_too_large(client: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="demo", prompt="x" * (33 << 20))
    assert caught.value.status_code == 413


def test_patience_that_ends(server: Server, client: Any) -> None:
    """The package hangs up; nothing of the request is left."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(**LONG, n=8)
    wait_for(lambda: idle(server), 1.0, "all is free")


def test_streams_that_are_left(server: Server, client: Any) -> None:
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
    wait_for(lambda: idle(server), 1.0, "all is free")


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(QUIRE_API_KEY="sesame") as server:
        with client_of(server) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        with client_of(server, api_key="sesame") as client:
            assert client.models.list().data[0].id == "demo"


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """Takes one request at a time, and lets one more wait."""
    flags = ("--device", "reference", "--max-num-seqs", "1", "--max-queued-requests", "1")
    with running(*flags) as server:
        yield server


def test_a_full_server_is_asked_again(slow: Server) -> None:
    with client_of(slow) as client, client_of(slow, max_retries=10) as patient:
        running = client.completions.create(**LONG, stream=True)
        next(iter(running))
        waiting = threading.Thread(target=client.completions.create, kwargs={**PROMPT, "max_tokens": 2})
        waiting.start()
        wait_for(lambda: slow.load()["num_requests_queued"] == 1, 10, "one waits")
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**PROMPT)
        assert (caught.value.status_code, caught.value.code) == (503, "server_overloaded")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        threading.Timer(0.5, running.close).start()
        assert patient.completions.create(**PROMPT, max_tokens=2).usage.completion_tokens == 2
        waiting.join()


def test_an_engine_that_dies_in_a_stream(slow: Server) -> None:
    """The stream goes on in the next engine; who asks before it is there is told when to come back."""
    asked = LONG | {"seed": 1, "temperature": 1, "max_tokens": 40}
    with client_of(slow) as client:
        expected = client.completions.create(**asked).choices[0].text
        stream = iter(client.completions.create(**asked, stream=True))
        first = next(stream)
        os.kill(slow.engine_pid, signal.SIGKILL)
        assert "".join(chunk.choices[0].text for chunk in (first, *stream)) == expected
        os.kill(slow.engine_pid, signal.SIGKILL)
    with client_of(slow, max_retries=4) as client:
        assert client.completions.create(**PROMPT, max_tokens=1).choices


def test_nobody_is_there() -> None:
    nowhere = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="any", max_retries=0)
    with nowhere as client, pytest.raises(openai.APIConnectionError):
        client.models.list()
