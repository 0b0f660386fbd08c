"""Clients that read byte by byte, slowly or not at all, and that leave at any moment and in any way.

QUIRE_TEST_TIMES=50 makes 10,000 of them leave.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any

import pytest
from requests_over_http import LONG, SHORT, address, idle, wait_for, written
from server import Server
from sse_torture import arrivals, connect, misbehave, read, requests, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAMED: Any = {**SHORT, "max_tokens": 30, "stream": True, "logprobs": 1, "temperature": 1.0}
NUM_ABORTS = 200 * int(os.environ.get("QUIRE_TEST_TIMES", "1"))
GAUGES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")


def free(server: Server) -> bool:
    """Whether the gauges say that nothing is computed, nothing waits and no block is taken."""
    with server.client() as client:
        text = client.get("/metrics").text
    values = [re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in GAUGES]
    assert all(values)
    return not any(float(value[1]) for value in values if value)


def deltas(events: list[str]) -> list[Any]:
    """What all chunks say of the answer, with nothing that is another's the next time."""
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_the_same_however_it_is_cut(server: Server, size: int) -> None:
    with connect(server) as connection, connect(server, 4096) as other:
        connection.sendall(written(STREAMED))
        expected = read(connection, 1 << 20)
        for byte in written(STREAMED):  # heard byte by byte, too
            other.sendall(bytes([byte]))
        found = read(other, size)
    assert found.status == 200
    assert len(found.body) > 2000
    joined = ["".join(c["text"] for cs in deltas(r.events) for c in cs) for r in (expected, found)]
    assert joined[0] == joined[1] != ""


def test_requests_that_follow_each_other_without_waiting(server: Server) -> None:
    """Answers come in the order of their questions, whole and streamed ones, on one connection."""
    bodies: list[Any] = [STREAMED | {"prompt": f"{n} dragons", "stream": n % 2 == 0} for n in range(6)]
    raw = [written(body).replace(b"Connection: close\r\n", b"") for body in bodies]
    with connect(server) as connection:
        connection.sendall(b"".join(raw))
        texts, rest = [], b""
        for body in bodies:
            reply = read(connection, 64, rest)
            assert reply.status == 200
            whole_one = [json.loads(reply.body)["choices"]] if not body["stream"] else deltas(reply.events)
            texts.append("".join(choice["text"] for choices in whole_one for choice in choices))
            rest = reply.rest
    alone = [whole(server, COMPLETIONS, body | {"stream": False})["choices"][0]["text"] for body in bodies]
    assert texts == alone
    assert len(set(texts)) == 6


def test_a_fast_reader_beside_slow_ones(server: Server) -> None:
    """Streams that are read a byte in 5 ms, or not at all, hold up nobody."""
    body: Any = LONG | {"stream": True, "logprobs": 5, "n": 4, "temperature": 1.0}
    left = threading.Event()

    def dawdle(connection: socket.socket, reads: bool) -> None:
        while not left.wait(0.005):
            if reads:
                connection.recv(1)

    with ThreadPoolExecutor(6) as pool:
        slow = [connect(server, 4096) for _ in range(6)]
        for number, connection in enumerate(slow):
            connection.sendall(written(body))
            pool.submit(dawdle, connection, number % 2 == 0)
        try:
            with connect(server) as fast:
                fast.sendall(written(LONG | {"stream": True, "max_tokens": 900}))
                times = arrivals(fast)
        finally:
            left.set()
            for connection in slow:
                connection.close()
    gaps = sorted(after - before for before, after in pairwise(times))
    assert len(gaps) > 100
    assert gaps[len(gaps) // 2] < 0.1
    assert gaps[-1] < 1.0
    wait_for(lambda: free(server), 1.0, "all is free")


def test_a_connection_that_is_closed_for_writing(server: Server) -> None:
    """Who says no more has left: what was asked for is given up, and the connection ends."""
    with connect(server) as connection:
        connection.sendall(written(LONG))
        wait_for(lambda: server.load()["num_requests_running"] == 1, 60, "it runs")
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: free(server), 1.0, "all is free")
        assert connection.recv(1) == b""


def test_clients_that_leave_in_any_way(server: Server) -> None:
    """Hundreds, in groups. A second after each nothing is left of it, and answers are what they were."""
    rng = random.Random(11)
    paths = [CHAT, COMPLETIONS, *_more_paths(server)]
    golden = whole(server, COMPLETIONS, SHORT)["choices"]
    asked, ways = requests(rng, paths), set()
    with ThreadPoolExecutor(16) as pool:
        for begin in range(0, NUM_ABORTS, 100):
            group = [(*one, random.Random(begin + n)) for n, one in enumerate(islice(asked, 100))]
            ways |= set(pool.map(lambda one: misbehave(server, *one), group))
            wait_for(lambda: free(server), 1.0, "all is free")
            assert whole(server, COMPLETIONS, SHORT)["choices"] == golden
    assert len(ways) >= 12
    wait_for(lambda: idle(server), 1.0, "nothing is left")


def _more_paths(server: Server) -> list[str]:
    with server.client() as client:
        known = client.get("/openapi.json").json()["paths"]
    return [path for path in ("/v1/messages", "/v1/responses") if path in known]


def test_connections_that_only_stand_there(server: Server) -> None:
    """Hundreds that say nothing, or half of a request, cost others nothing."""
    silent = [socket.create_connection(address(server)) for _ in range(300)]
    for number, connection in enumerate(silent):
        connection.sendall(written(SHORT)[: number % 150])
    begin = time.monotonic()
    for _ in range(20):
        assert whole(server, COMPLETIONS, SHORT)["choices"]
    assert time.monotonic() - begin < 5
    for connection in silent:
        connection.close()
    wait_for(lambda: idle(server), 1.0, "nothing is left")
