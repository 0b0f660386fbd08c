"""Streams whose engine is killed: every API, to the bit what it was without, and no piece of it twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from endurance.answers import Answer, Case
from endurance.asking import Exchange
from endurance.essence import essence
from endurance.mixture import FUNCTION, SCHEMA
from requests_over_http import idle, wait_for
from server import Server, running

from quire.backends.native import _core
from quire.bench.http_client import Client

TURNS = {"messages": [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]}
SAMPLED = {"temperature": 1.1, "seed": 4, "max_tokens": 40, "ignore_eos": True}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, TURNS | SAMPLED | {"stream_options": {"include_usage": True}}),
    "tools": (CHAT, TURNS | TOOLS | {"temperature": 1, "seed": 1, "max_tokens": 200}),
    "grammar": (CHAT, TURNS | {"response_format": FORM, "seed": 2, "max_tokens": 200}),
    "logprobs": (CHAT, TURNS | SAMPLED | {"logprobs": True, "top_logprobs": 5}),
    "several": (CHAT, TURNS | SAMPLED | {"n": 3, "logprobs": True, "top_logprobs": 1}),
    "penalties": (
        COMPLETIONS,
        SAMPLED | {"prompt": "Once upon a time", "repetition_penalty": 1.3, "bad_words": ["the"]},
    ),
    "stop": (COMPLETIONS, SAMPLED | {"prompt": "Once upon", "n": 4, "stop": ["a", "e."], "min_tokens": 12}),
    "echo": (COMPLETIONS, SAMPLED | {"prompt": "Once upon a time", "echo": True, "logprobs": 2}),
    "prompts": (COMPLETIONS, SAMPLED | {"prompt": ["a", "b c", "d"], "return_token_ids": True}),
    "responses": ("/v1/responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 40}),
    "messages": ("/v1/messages", TURNS | {"temperature": 0, "max_tokens": 40}),
    "not a stream": (CHAT, TURNS | SAMPLED | {"logprobs": True, "n": 2, "stream": False}),
}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    """One whose steps take long enough to be killed between two of them, and whose engine is back at once."""
    quick = "import quire.server.remote as r; Policy = r.RestartPolicy; r.RestartPolicy = lambda: Policy("
    paces = "first_delay_s=0.01, longest_delay_s=0.01, max_deaths=1000)"
    with running("--device", "reference", before=quick + paces) as server:
        yield server


class Watched(Exchange):
    """A request at whose events, of these numbers, the engine is killed."""

    def __init__(self, case: Case, server: Server, kill_at: tuple[int, ...]) -> None:
        super().__init__(case)
        self.server, self.kill_at = server, kill_at
        self.num_killed = 0

    def _take(self, data: bytes, at_s: float) -> bool:
        left = super()._take(data, at_s)
        if self.num_events in self.kill_at:
            self.kill()
        return left

    def kill(self) -> None:
        os.kill(self.server.engine_pid, signal.SIGKILL)
        self.num_killed += 1


def ask(server: Server, name: str, kill_at: tuple[int, ...] = ()) -> tuple[Answer, int]:
    """The answer to a case, and how often the engine was killed meanwhile."""
    path, body = CASES[name]
    return exchange(
        Case(name, path, json.dumps({"stream": True, **body}).encode(), lambda _: ""), server, kill_at
    )


def exchange(case: Case, server: Server, kill_at: tuple[int, ...]) -> tuple[Answer, int]:
    one = Watched(case, server, kill_at)

    with server.client() as health:
        wait_for(lambda: health.get("/health/ready").status_code == 200, 60, "ready")

    async def run() -> None:
        client = Client(server.url)
        asking = asyncio.create_task(one.run(client, 60.0))
        if kill_at and not json.loads(case.body)["stream"]:
            await asyncio.to_thread(
                lambda: wait_for(lambda: server.load()["num_requests_running"] > 0, 60, "runs")
            )
            one.kill()
        await asking
        client.close()

    asyncio.run(run())
    assert not one.problem
    return one.answer, one.num_killed


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_what_it_would_have_been(slow_server: Server, name: str) -> None:
    server = slow_server
    undisturbed, _ = ask(server, name)
    disturbed, num_killed = ask(server, name, (2, 9))
    assert num_killed >= 1
    assert essence(disturbed) == essence(undisturbed)
    if name == "not a stream":
        assert disturbed.body["timings"]["continuations"] >= 0
    wait_for(lambda: idle(server), 60, "all is free")


def test_a_piece_that_comes_twice_is_noticed(slow_server: Server) -> None:
    """The negative control."""
    found, _ = ask(slow_server, "chat")
    again = Answer(200, events=[*found.events[:5], *found.events[4:]])
    assert essence(again) != essence(found)


def test_an_engine_with_another_fingerprint_is_named_beside_the_first() -> None:
    """The next engine runs on another instruction set: later chunks say so, and the bits may differ."""
    other = _core.isas()[-1]
    change = (
        "import os, quire.server.remote as r; old = r.RemoteEngine._lose_requests\n"
        f"def lose(self, cause): os.environ['QUIRE_ISA'] = {other!r}; old(self, cause)\n"
        "r.RemoteEngine._lose_requests = lose"
    )
    path, body = COMPLETIONS, SAMPLED | {"prompt": "Once upon a time", "max_tokens": 400, "stream": True}
    with running(before=change) as server:
        case = Case("other", path, json.dumps(body).encode(), lambda _: "")
        answer, _ = exchange(case, server, (1,))
        names = list(dict.fromkeys(event["system_fingerprint"] for event in answer.events))
        with server.client() as client:
            later = client.post(path, json=body | {"max_tokens": 1, "stream": False}).json()
    assert other in later["system_fingerprint"]
    assert names[-1] == f"{names[0]}+{later['system_fingerprint']}"
    assert len(names) == 2
