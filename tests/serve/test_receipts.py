"""Where the time of an HTTP request went: the parts are the whole, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests_over_http import LONG, SHORT, Background, address, idle, wait_for, written
from server import Server, running

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.timings import Deliveries, generation_ms, logged, receipt_ms, server_timing
from quire.types import RequestMetrics

PARTS = ("queue", "prefill", "decode", "preempted")
RECEIPT = ("interference", "interference_prefill", "interference_decode", "grammar", "cached_saved", "ideal")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1}
SMALL = ("--kv-cache-memory-bytes", str(3 << 19), "--max-model-len", "384", "--max-num-seqs", "2")
PRINT_TIMINGS = """
import json
from quire.server.request import ServerRequest
report = ServerRequest._report
def print_and_report(self, state):
    if self.prompts:
        print("timings:", json.dumps(self.timings()), flush=True)
    report(self, state)
ServerRequest._report = print_and_report
"""


def check(timings: dict[str, float]) -> None:
    """The parts are all there, none is negative, and they are the whole."""
    parts = [timings[f"{name}_ms"] for name in PARTS]
    assert all(part >= 0 for part in parts), timings
    assert sum(parts) == pytest.approx(timings["total_ms"], abs=0.01)
    added = timings["interference_prefill_ms"] + timings["interference_decode_ms"]
    assert timings["interference_ms"] == pytest.approx(added, abs=0.01)
    assert all(timings[f"{name}_ms"] >= 0 for name in RECEIPT)
    assert 0 <= timings["accepted_tokens"] <= timings["drafted_tokens"]
    assert isinstance(timings["drafting_saved_ms"], float)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server that computes slowly, with blocks for one long answer, and tells all timings."""
    with running("--device", "reference", *SMALL, before=PRINT_TIMINGS) as server:
        yield server


def told(server: Server) -> list[dict[str, float]]:
    """The timings of all requests so far."""
    return [json.loads(line[9:]) for line in server.log.splitlines() if line.startswith("timings: ")]


# Answers


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 1.0},
        {"prompt": ["Once", "The fox", "A small dog"], "n": 2},
        {"max_tokens": 1},
        {"stop": "e", "max_tokens": 100},
        {"structured_outputs": {"regex": "[ab]{6}"}, "ignore_eos": False},
    ],
)
def test_a_completion(client: httpx.Client, more: dict[str, Any]) -> None:
    reply = client.post("/v1/completions", json=SHORT | more)
    timings = reply.json()["timings"]
    check(timings)
    named = {
        name: float(value) for name, value in re.findall(r"(\w+);dur=([^,]+)", reply.headers["server-timing"])
    }
    assert {*PARTS, "total"} <= set(named)
    assert named["queue"] == pytest.approx(timings["queue_ms"], abs=0.01)
    assert sum(named[name] for name in PARTS) == pytest.approx(named["total"], abs=0.1)


def test_all_apis_have_them(client: httpx.Client) -> None:
    check(client.post("/v1/chat/completions", json=CHAT).json()["timings"])
    check(client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 12}).json()["timings"])
    check(client.post("/v1/messages", json=CHAT | {"model": "demo"}).json()["timings"])
    for path, body in (
        ("/completion", {"prompt": "Hi", "n_predict": 5}),
        ("/api/chat", CHAT | {"stream": False}),
    ):
        header = client.post(path, json=body).headers["server-timing"]
        assert "decode;dur=" in header


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream(client: httpx.Client, path: str) -> None:
    """Its header has what is over when it begins, its last chunk all."""
    body = (SHORT if path == "/v1/completions" else CHAT) | {"stream": True}
    with client.stream("POST", path, json=body) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
        header = reply.headers["server-timing"]
    assert re.fullmatch(r"queue;dur=[^,]+, prefill;dur=[^,]+(, decode.*)?", header)
    timings = json.loads(lines[-1][6:])["timings"]
    check(timings)
    assert timings["decode_ms"] > 0


def test_a_request_that_runs_no_prompt_has_no_header(client: httpx.Client) -> None:
    assert "server-timing" not in client.post("/tokenize", json={"prompt": "Hi"}).headers


def test_others_are_told(server: Server, client: httpx.Client) -> None:
    """An answer alone has no interference; beside another one, both have."""
    wait_for(lambda: idle(server), 60, "nothing runs")
    alone = client.post("/v1/completions", json=SHORT).json()["timings"]
    other = Background(server, LONG | {"n": 16})  # so many that it does not end first
    assert other.first.wait(30)
    beside = client.post("/v1/completions", json=SHORT | {"prompt": "word " * 40}).json()["timings"]
    others = json.loads(other.end()[-2])["timings"]
    assert alone["interference_ms"] == 0 < alone["ideal_ms"]
    assert beside["interference_decode_ms"] > 0
    assert others["interference_prefill_ms"] > 0
    assert others["interference_ms"] < others["prefill_ms"] + others["decode_ms"]
    check(others)


# Ends of other kinds


def test_preempted_queued_and_left_requests(slow: Server) -> None:
    """Two answers for whose blocks there is no room, one that waits meanwhile, and clients that leave."""
    bodies = [LONG | {"prompt": text, "max_tokens": 300} for text in ("One", "Two")]
    num_told = len(told(slow))
    both = [Background(slow, body) for body in bodies]
    assert all(one.first.wait(30) for one in both)
    third = Background(slow, SHORT | {"prompt": "Three"})
    left_in_queue = socket.create_connection(address(slow))
    left_in_queue.sendall(written(LONG))
    wait_for(lambda: slow.load()["num_requests_waiting"] >= 2, 60, "they wait")
    left_in_queue.close()
    wait_for(lambda: len(told(slow)) == num_told + 1, 60, "it left")
    in_queue = told(slow)[-1]
    assert in_queue["queue_ms"] == pytest.approx(in_queue["total_ms"], abs=0.01)
    timings = [json.loads(one.end()[-2])["timings"] for one in (*both, third)]
    assert [one["preempted_ms"] > 0 for one in timings] == [one["preemptions"] > 0 for one in timings]
    assert sum(one["preemptions"] for one in timings) > 0
    assert timings[2]["queue_ms"] > timings[2]["decode_ms"]
    leaving = Background(slow, LONG)
    assert leaving.first.wait(30)
    leaving.leave()
    wait_for(lambda: len(told(slow)) == num_told + 5, 60, "all have ended")
    for one in (*timings, *told(slow)):
        check(one)
    left = told(slow)[-1]
    assert left["prefill_ms"] > 0  # the admission is known from the first output on
    assert left["decode_ms"] > 0
    wait_for(lambda: idle(slow), 1, "all is free")
    line = next(line for line in slow.log.splitlines() if "completion_tokens=" in line)
    assert re.search(r"queue_ms=[\d.]+ prefill_ms=[\d.]+ decode_ms=[\d.]+ preempted_ms=[\d.]+", line)


def test_the_engine_dies() -> None:
    """The time until the next engine gives a token is no decoding: it is preempted."""
    with running("--device", "reference", "--max-num-seqs", "1", before=PRINT_TIMINGS) as server:
        runs = Background(server, LONG | {"max_tokens": 40})
        assert runs.first.wait(30)
        before = len(told(server))
        os.kill(server.engine_pid, signal.SIGKILL)
        assert runs.end(60)[-1] == "[DONE]"
        wait_for(lambda: len(told(server)) > before, 60, "its timings are known")
        timings = told(server)[-1]
        check(timings)
        assert (timings["continuations"], timings["preemptions"]) == (1, 0)
        assert timings["prefill_ms"] > 0
        assert timings["decode_ms"] > 0
        assert timings["preempted_ms"] > 500  # the server pauses for so long


# What is known, in milliseconds


def choice(index: int, *times: float | None, **receipt: float) -> CompletionOutput:
    return CompletionOutput(index, metrics=RequestMetrics(*times, **receipt))  # type: ignore[arg-type]


def answer(*choices: CompletionOutput) -> RequestOutput:
    return RequestOutput("a", None, [1, 2], list(choices))


def test_the_choice_that_ends_last_counts() -> None:
    first = choice(0, 0.0, 1.0, 3.0, 4.0, decode_interference_s=0.25)
    second = choice(1, 0.0, 3.5, 5.0, 9.0, preempted_s=2.0, prefill_preempted_s=0.5, ideal_s=0.125)
    found = receipt_ms([(answer(first, second), Deliveries(2, 3.1, 9.1))], 0.0, 9.5)
    assert (found["queue_ms"], found["prefill_ms"], found["decode_ms"]) == (1000.0, 3500.0, 3000.0)
    assert (found["preempted_ms"], found["total_ms"]) == (2000.0, 9500.0)
    assert (found["interference_ms"], found["ideal_ms"]) == (0.0, 125.0)
    other = answer(choice(0, 0.0, 2.0, 3.0, 9.25))
    later = receipt_ms(
        [(answer(first, second), Deliveries(2, 3.1, 9.1)), (other, Deliveries(2, 3.1, 9.3))], 0.0, 9.5
    )
    assert later["queue_ms"] == 2000.0


moments = st.lists(st.floats(0, 100), min_size=5, max_size=5).map(sorted)


@given(
    st.lists(st.tuples(moments, st.integers(0, 4), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4)
)
def test_the_parts_are_the_whole_whatever_is_known(
    cases: list[tuple[list[float], int, float, float]],
) -> None:
    """Of a choice of which nothing, the admission, the first token or the end has come."""
    choices = []
    for index, (times, num_known, early, late) in enumerate(cases):
        _, admitted, first, end, _ = times
        if num_known == 0:
            choices.append(CompletionOutput(index))
            continue
        prefill_preempted_s = early * (first - admitted) if num_known > 2 else 0.0
        preempted_s = prefill_preempted_s + (late * (end - first) if num_known > 3 else 0.0)
        known = [0.0, admitted, first, end]
        shown = [*known[:num_known], *[None] * (4 - num_known)]
        choices.append(
            choice(index, *shown, preempted_s=preempted_s, prefill_preempted_s=prefill_preempted_s)
        )
    found = receipt_ms([(answer(*choices), Deliveries())], 0.0, 100.0)
    assert sum(found[f"{name}_ms"] for name in PARTS) == pytest.approx(found["total_ms"], abs=1e-6)
    assert found["total_ms"] == 100_000


def test_header_and_log_leave_out_what_did_not_happen() -> None:
    times = receipt_ms([(answer(choice(0, 0.0, 1.0, 3.0, 4.0)), Deliveries(1, 3.0, 4.0))], 0.0, 4.0)
    header = "queue;dur=1000, prefill;dur=2000, decode;dur=1000, preempted;dur=0, total;dur=4000"
    assert server_timing(times, complete=True) == header
    assert server_timing(times, complete=False) == "queue;dur=1000, prefill;dur=2000"
    assert "interference_ms" not in logged(times)
    times |= {"interference_ms": 30.0, "interference_prefill_ms": 30.0, "cached_saved_ms": 7.5}
    assert (
        server_timing(times, complete=True) == f"{header}, interference_prefill;dur=30, cached_saved;dur=7.5"
    )
    assert logged(times)["interference_ms"] == 30.0


def test_times_of_generation_are_those_of_deliveries() -> None:
    """As clients of llama.cpp know them."""
    output = answer(choice(0, 0.0, 1.0, 2.9, 4.0))
    assert generation_ms(output, Deliveries(3, 3.0, 4.5)) == (2000.0, 1500.0)
    assert generation_ms(output, Deliveries()) == (0.0, 0.0)
    assert generation_ms(answer(CompletionOutput(0)), Deliveries(3, 3.0, 4.5)) == (0.0, 1500.0)
