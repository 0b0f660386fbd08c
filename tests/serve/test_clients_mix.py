"""What a request is answered does not depend on the requests beside it, before it, or on what became of them.

A server with few slots and few blocks computes many requests of every kind at once: some are preempted, some
are left by their clients, some are refused. Another computes each alone. Tokens and the bits of logprobs are
the same. QUIRE_TEST_TIMES=20 compares 1,800.
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
from request_mix import WRONG, answer, request
from requests_over_http import idle, wait_for, written
from server import Server, running
from sse_torture import connect

NUM_REQUESTS = 90 * int(os.environ.get("QUIRE_TEST_TIMES", "1"))
CONTEXT = ("--max-model-len", "384")  # as much as the small cache holds
SMALL = ("--kv-cache-memory-bytes", str(3 << 18), "--max-num-seqs", "8", "--max-num-batched-tokens", "48")


@pytest.fixture(scope="module")
def crowded() -> Iterator[Server]:
    """24 blocks, which two or three requests fill."""
    with running(*CONTEXT, *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def spacious() -> Iterator[Server]:
    """Room for all, and nothing of one prompt serves another."""
    with running(*CONTEXT, "--no-enable-prefix-caching") as server:
        yield server


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
    asked = [request(rng) for _ in range(NUM_REQUESTS)]
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
    wait_for(lambda: idle(crowded), 1.0, "all is free")
