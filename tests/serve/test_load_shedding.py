"""While the queue is full, requests are refused before their bodies are read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from guarded import make_metrics, read_one, serve
from requests_over_http import LONG, SHORT, Background, address, wait_for
from server import Server, running

from quire.config import EngineConfig, ServerConfig
from quire.server.app import make_app
from quire.server.service import QueueFull

GENERATING = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/completion", "/completions"),
)
WITHOUT_ANSWER = (
    *("/tokenize", "/detokenize", "/apply-template"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
)
UNREADABLE: dict[str, Any] = {"content": b"{", "headers": {"content-type": "application/json"}}


def head(path: str) -> bytes:
    """The head of a request whose body does not come."""
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, "Content-Length: 100", "", "")).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--device", "reference", "--max-num-seqs", "1", "--max-queued-requests", "1") as started:
        yield started


@pytest.fixture(scope="module")
def full(server: Server) -> Server:
    """The server with its only slot and its only place in the queue taken, for a while."""
    held = Background(server, LONG)
    assert held.first.wait(30)
    Background(server, SHORT)
    wait_for(lambda: server.load()["num_requests_queued"] == 1, 60, "one waits")
    return server


def test_a_slow_upload_holds_no_place(server: Server) -> None:
    with socket.create_connection(address(server)) as connection, server.client() as client:
        connection.sendall(head("/v1/completions"))
        wait_for(lambda: server.load()["server_load"] == 1, 60, "it is open")
        assert server.load()["num_requests_queued"] == 0
        assert client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_refuses_before_it_reads(full: Server, path: str) -> None:
    with socket.create_connection(address(full), timeout=5) as connection:
        connection.sendall(head(path))
        status, headers, body = read_one(connection)
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert b"the queue is full: 1 requests wait" in body


def test_a_full_queue_refuses_nothing_that_needs_no_place(full: Server) -> None:
    """Whoever looks at a busy server, or adds replicas to it, must not wait for those it is busy with."""
    with full.client() as client:
        shown = client.post("/api/show", json={"model": "demo"})
    assert shown.status_code == 200, shown.text
    assert full.load()["num_requests_queued"] == 1


def test_refusals_are_counted_one_by_one_and_logged_together(full: Server) -> None:
    with full.client() as client:
        for _ in range(5):
            assert client.post("/v1/completions", **UNREADABLE).status_code == 503
        metrics = client.get("/metrics").text
    (counted,) = (line for line in metrics.splitlines() if 'reason="requests"' in line and "_total" in line)
    assert float(counted.split()[-1]) >= 5
    assert 'path="/v1/completions",status="5xx"' in metrics
    wait_for(lambda: "queue full" in full.log, 60, "a line of the log")
    assert "status=503 ms=" not in full.log


def test_a_goal_for_the_first_token_refuses_nothing_that_has_none() -> None:
    def check_queue(num_requests: int = 1, num_tokens: int = 0, timely: bool = True) -> None:
        if timely:
            raise QueueFull("the first token would come in 3.0 s, and the goal is 1 s")

    counts = dict.fromkeys(("num_uploading_bytes", "num_queued_requests", "num_queued_tokens"), 0)
    service: Any = SimpleNamespace(
        config=ServerConfig(page=False),
        engine_config=EngineConfig(),
        frontend=SimpleNamespace(sees=False),
        metrics=make_metrics(),
        replicas=None,
        refusing=False,
        requests=set(),
        check_queue=check_queue,
        **counts,
    )
    with serve(wrapped=make_app(service, ())) as server:
        for path in (*WITHOUT_ANSWER, "/v1/messages"):
            status, _, body = server.ask("POST", path, {"Content-Type": "application/json"}, b"{")
            assert status == (400 if path in WITHOUT_ANSWER else 503), (path, body)
    assert service.num_queued_requests == 0
