"""What is left out of a request is said in the response and in the log."""

from __future__ import annotations

import time

import httpx
import pytest
from server import Server

SAID = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 1}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_warnings_are_in_the_response_and_in_the_log(
    server: Server, client: httpx.Client, path: str, body: dict[str, object], stream: bool
) -> None:
    name = f"odd_{path.rpartition('/')[2]}_{stream}"
    reply = client.post(path, json={**body, name: 1, "stream": stream})
    warning = f"unknown field '{name}' has no effect"
    assert warning in reply.text
    end = time.monotonic() + 30
    while not any(warning in line and f"path={path} " in line for line in server.log.splitlines()):
        assert time.monotonic() < end, server.log[-2000:]
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body", "warning"),
    [
        ("/v1/chat/completions", {"messages": SAID, "reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/messages", {"messages": SAID, "output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_an_effort_that_the_template_does_not_read_is_said(
    client: httpx.Client, path: str, body: dict[str, object], warning: str
) -> None:
    reply = client.post(path, json={**body, "max_tokens": 1}).json()
    assert reply["warnings"] == [f"{warning} has no effect"]
