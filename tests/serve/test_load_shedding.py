"""While the queue is full, requests are refused before their bodies are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from requests_over_http import LONG, SHORT, Background, wait_for
from server import running

GENERATING = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/completion", "/completions"),
)
UNREADABLE: dict[str, Any] = {"content": b"{", "headers": {"content-type": "application/json"}}


@pytest.fixture(scope="module")
def full() -> Iterator[httpx.Client]:
    """A client of a server whose only slot and only place in the queue are taken, for a while."""
    options = ("--device", "reference", "--max-num-seqs", "1", "--max-queued-requests", "1")
    with running(*options) as server, server.client() as client:
        held = Background(server, LONG)
        assert held.first.wait(30)
        Background(server, SHORT)
        wait_for(lambda: client.get("/load").json()["num_requests_queued"] == 1, 10, "one waits")
        client.server = server  # type: ignore[attr-defined]
        yield client


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_refuses_before_it_reads(full: httpx.Client, path: str) -> None:
    reply = full.post(path, **UNREADABLE)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert "the queue is full: 1 requests wait" in reply.text


def test_refusals_are_counted_one_by_one_and_logged_together(full: httpx.Client) -> None:
    for _ in range(5):
        full.post("/v1/completions", **UNREADABLE)
    metrics = full.get("/metrics").text
    (counted,) = (line for line in metrics.splitlines() if 'reason="requests"' in line and "_total" in line)
    assert float(counted.split()[-1]) >= 5
    assert 'path="/v1/completions",status="5xx"' in metrics
    log = full.server.log  # type: ignore[attr-defined]
    wait_for(lambda: "queue full" in full.server.log, 3, "a line of the log")  # type: ignore[attr-defined]
    assert "status=503 ms=" not in log
