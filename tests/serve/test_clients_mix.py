"""What a request is answered does not depend on the requests beside it, before it, or on what became of them.

A server with few slots and few blocks computes many requests of every kind at once: some are preempted, some
are left by their clients, some are refused; it drafts tokens. Another computes each alone, without drafts.
Texts, tokens, the bits of logprobs and the usage are the same. QUIRE_TEST_TIMES=20 compares 1,800.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import test_anthropic
import test_responses
from named_events import events
from request_mix import WRONG, answer, message, response
from request_mix import request as draw
from requests_over_http import idle, wait_for, written
from server import Server, running
from sse_torture import connect

TIMES = int(os.environ.get("QUIRE_TEST_TIMES", "1"))
NUM_REQUESTS = 90 * TIMES
CONTEXT = ("--max-model-len", "384")  # as much as the small cache holds
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "48")
# 24 blocks, which two or three requests fill; a draft model has its share in each.
BYTES = {"auto": 24 << 15, "demo-draft": 33 << 15}


@pytest.fixture(scope="module", params=BYTES)
def crowded(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Few slots and blocks; drafts of texts and grammars, and of a model."""
    memory = ("--kv-cache-memory-bytes", str(BYTES[request.param]))
    with running(*CONTEXT, *SMALL, *memory, "--speculative", request.param) as server:
        yield server


@pytest.fixture(scope="module")
def spacious() -> Iterator[Server]:
    """Room for all; nothing of one prompt serves another, and every step gives a sequence one token."""
    with running(*CONTEXT, "--no-enable-prefix-caching", "--speculative", "off") as server:
        yield server


# Of other APIs: the bodies, a response made of a stream's events, and what can be compared of it.
OTHERS: dict[str, tuple[Any, ...]] = {
    test_anthropic.PATH: (message, test_anthropic.joined, test_anthropic.comparable),
    test_responses.PATH: (response, test_responses.joined, test_responses.comparable),
}


def counter(server: Server, name: str) -> float:
    """The sum of a counter over its labels."""
    with server.client() as client:
        text = client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))


def leave(server: Server, path: str, body: Any, rng: random.Random) -> None:
    """Ask, hear a little, and go."""
    with connect(server) as connection:
        connection.sendall(written(body | {"max_tokens": 200, "stream": True}, path))
        connection.recv(rng.choice([1, 500, 5000]))


def test_answers_are_what_they_are_alone(spacious: Server, crowded: Server) -> None:
    rng = random.Random(23)
    asked = [draw(rng) for _ in range(NUM_REQUESTS)]
    with spacious.client() as client:
        alone = [answer(client, path, body, stream=False) for path, body in asked]
    assert sum(choices is not None for choices in alone) > 0.8 * len(asked)

    def ask(number: int) -> Any:
        own = random.Random(number)
        path, body = asked[number]
        if own.random() < 0.3:
            leave(crowded, *asked[own.randrange(len(asked))], own)
        if own.random() < 0.1:
            assert client.post("/v1/completions", json=own.choice(WRONG)).status_code == 400
        return answer(client, path, body, stream=alone[number] is not None and own.random() < 0.5)

    limits = httpx.Limits(max_connections=None)
    with crowded.client(limits=limits) as client, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(len(asked))))
    for one, other, (path, body) in zip(found, alone, asked, strict=True):
        assert one == other, (path, body)
    assert counter(crowded, "num_preemptions") > 0
    accepted = "spec_decode_num_accepted_tokens"
    assert counter(crowded, accepted) > 0 == counter(spacious, accepted)
    wait_for(lambda: idle(crowded), 1.0, "all is free")


@pytest.mark.parametrize("path", OTHERS)
def test_answers_of_other_apis_are_the_same(spacious: Server, crowded: Server, path: str) -> None:
    """Whole and streamed, with the tokens that they count."""
    rng, (draw_body, joined, comparable) = random.Random(path), OTHERS[path]

    def counts(answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]

    with spacious.client() as one, crowded.client() as other:
        for body in [draw_body(rng) for _ in range(10 * TIMES)]:
            reply = one.post(path, json=body)
            if reply.status_code == 400:  # longer than the context
                continue
            assert reply.status_code == 200, reply.text
            for found in (other.post(path, json=body).json(), joined(events(other, path, **body))):
                assert comparable(found) == comparable(reply.json()), body
                assert counts(found) == counts(reply.json()), body
