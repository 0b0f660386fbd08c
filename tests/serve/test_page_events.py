"""The events of the page over real sockets: equal to what the API says, and about nobody's text."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from faulty_engine import KILL
from page_viewer import viewing
from requests_over_http import Background, address, wait_for
from server import Server, running

from quire.config import EngineConfig
from quire.description import describe
from quire.program.program import Load
from quire.roofline.law import fold_costs
from quire.step_record import Record
from quire.types import Bound

TAG = re.compile(r"[0-9a-f]{8}")
NUM_TOKENS = 12
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": NUM_TOKENS}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS},
    "/v1/responses": {"input": "Tell me a story about a fox.", "max_output_tokens": NUM_TOKENS},
    "/v1/messages": CHAT | {"model": "demo"},
}
SLOW = (sys.executable, str(Path(__file__).with_name("faulty_engine.py")), "20")  # ms a step
REPLACED = "import functools, quire.server.lifecycle as l; "
REPLACED += f"l.RemoteEngine = functools.partial(l.RemoteEngine, command={SLOW!r})"


PLAIN = ("--speculative", "off")  # a step gives a request one token


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that drafts nothing."""
    with running(*PLAIN) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server whose steps take 20 ms, and whose engine a prompt can kill."""
    with running(*PLAIN, before=REPLACED) as server:
        yield server


def complete(client: httpx.Client, prompt: object, max_tokens: int = 12, **fields: object) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body).raise_for_status()


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys of objects left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


# Equal to the API


def test_facts_and_law_are_those_of_the_api(server: Server, client: httpx.Client) -> None:
    complete(client, "Once upon a time")
    with viewing(server) as viewer:
        info, steps = client.get("/server_info").json(), client.get("/steps").json()
        first = viewer.frames[0]
        facts = first["facts"]
        for name in ("version", "chosen", "engine", "model"):
            assert facts[name] == info[name]
        assert (facts["fingerprint"], facts["names"]) == (info["system_fingerprint"], info["models"])
        assert facts["ceilings"] == steps["ceilings"]
        assert facts["ceilings_age_s"] == pytest.approx(steps["ceilings_age_s"], abs=60)
        assert (facts["keyed"], facts["recording"], facts["experiments"]) == (False, False, True)
        assert (facts["num_slots"], facts["block_size"]) == (info["engine"]["max_num_seqs"], 16)
        load = client.get("/load").json()
        assert facts["num_blocks"] == load["num_blocks"]
        law = next(frame["law"] for frame in reversed(viewer.frames) if "law" in frame)
        assert law == client.get("/steps/law").json()
        assert {name: first["counts"][name] for name in ("num_blocks", "num_free_blocks")} == {
            name: load[name] for name in ("num_blocks", "num_free_blocks")
        }


def test_steps_are_those_of_the_api(server: Server, client: httpx.Client) -> None:
    complete(client, "Before anybody watches")
    with viewing(server) as viewer:
        tag = complete(client, "Once upon a time", 40).headers["x-quire-tag"]
        viewer.wait(lambda: len(viewer.rows(tag)) == 40)
        listed = {step["index"]: step for step in client.get("/steps?last=4096").json()["steps"]}
        assert len(viewer.steps) >= 52
        for step in viewer.steps:
            found = {name: step[name] for name in Record.__dataclass_fields__}
            assert found == listed[step["index"]]
        before = [step for step in viewer.steps if step["rows"] is None]
        assert before
        assert all(step["began_s"] is None and step["flops"] is None for step in before)
        shown = [step for step in viewer.steps if step["rows"] is not None]
        assert [step["num_rows"] for step in shown] == [len(step["rows"]) for step in shown]
        for step in shown:
            assert 0 < step["began_s"] < step["ended_s"] <= viewer.frames[-1]["t"]
            took_s = step["ended_s"] - step["began_s"] - step["mask_s"]
            assert took_s == pytest.approx(step["device_s"], abs=1e-6)


def test_costs_are_exact(server: Server, client: httpx.Client) -> None:
    description = describe(EngineConfig(model="demo", num_threads=1))
    folded, law = fold_costs(description), client.get("/steps/law").json()
    with viewing(server) as viewer:
        tag = complete(client, [7] * 600, 10, n=3, temperature=1).headers["x-quire-tag"]
        viewer.wait(lambda: len(viewer.rows(tag)) >= 30)
        steps = [step for step in viewer.steps if step["rows"]]
    assert max(step["num_rows"] for step in steps) == 3
    assert max(step["num_tokens"] for step in steps) == 512
    for step in steps:
        rows, num_logits = [(row[1], row[2]) for row in step["rows"]], sum(row[4] for row in step["rows"])
        exact = description.program.cost(Load(rows, num_logits, 2), description.weights.stored_bytes)
        cost, found = folded.cost(rows, num_logits), folded.total
        for name in ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes"):
            assert step[name] == getattr(cost, name) == getattr(exact, name)
            assert law["cost"][name] == list(getattr(found, name))
    assert [one["kind"] for one in law["law"]["features"]] == [one.kind for one in folded.features]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_request_finds_its_rows_by_its_tag(
    server: Server, client: httpx.Client, path: str, stream: bool
) -> None:
    with viewing(server) as viewer:
        reply = client.post(path, json=APIS[path] | {"stream": stream})
        tag = reply.headers["x-quire-tag"]
        assert TAG.fullmatch(tag)
        viewer.wait(lambda: len(viewer.rows(tag)) == NUM_TOKENS)
        rows = viewer.rows(tag)
    num_prompt = rows[0][3]
    assert {row[3] for row in rows} == {num_prompt}
    assert all(before[1] + before[2] == after[1] for before, after in pairwise(rows))
    prefill = [row for row in rows if row[1] + row[2] <= num_prompt]
    assert sum(row[2] for row in prefill) == num_prompt - rows[0][1]
    assert len(prefill) == 1
    assert [row[2] for row in rows[1:]] == [1] * (len(rows) - 1)
    if not stream:
        usage = reply.json()["usage"]
        names = {"input_tokens", "prompt_tokens"} & usage.keys()
        assert num_prompt - usage.get("cache_read_input_tokens", 0) in [usage[name] for name in names]
        outputs = {"output_tokens", "completion_tokens"} & usage.keys()
        assert [usage[name] for name in outputs] == [NUM_TOKENS]


def test_counts_are_sums_since_the_start(server: Server, client: httpx.Client) -> None:
    with viewing(server) as viewer:
        before = viewer.frames[0]["counts"]
        reply = complete(client, "A prompt that nobody has sent", 20).json()
        num_tokens = reply["usage"]["prompt_tokens"] + 19
        after = before["num_tokens"] + num_tokens
        viewer.wait(
            lambda: any(one["counts"]["num_tokens"] == after for one in viewer.frames if "counts" in one)
        )


# Blocks


def test_blocks_that_two_requests_share_have_two_holders(slow: Server) -> None:
    prompt = [number % 200 + 3 for number in range(70)]  # four full blocks, and a part of one
    with viewing(slow) as viewer:
        with slow.client() as client:
            complete(client, prompt, 1)
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        both = [Background(slow, body) for _ in range(2)]
        group = viewer.wait(lambda: next((one for one in viewer.groups if len(one["tables"]) == 2), None))
        first, second = (table["blocks"] for table in group["tables"])
        assert first[:4] == second[:4]
        assert not set(first[4:]) & set(second[4:])
        states = {block: state for block, *state in group["blocks"]}
        assert [states[block] for block in first[:4]] == [[2, 1]] * 4
        assert states[second[4]][0] == 1
        assert group["num_held"] == len(set(first) | set(second))
        assert [table["num_cached_tokens"] for table in group["tables"]] == [64, 64]
        for one in both:
            one.leave()
        group = viewer.wait(lambda: viewer.groups[-1] if not viewer.groups[-1]["tables"] else None)
        states = {block: state for block, *state in group["blocks"]}
        assert [states[block] for block in first[:4]] == [[0, 1]] * 4
        assert (group["num_held"], group["num_free"]) == (0, group["num_blocks"])


# Watching


def test_frames_are_at_most_twenty_a_second(server: Server, client: httpx.Client) -> None:
    with viewing(server) as viewer:
        begin_s = time.monotonic()
        tag = complete(client, "Once upon a time", 900).headers["x-quire-tag"]
        viewer.wait(lambda: len(viewer.rows(tag)) == 900)
        seconds = time.monotonic() - begin_s
        times = [frame["t"] for frame in viewer.frames]
    assert all(after - before >= 0.0499 for before, after in pairwise(times))
    assert len(times) <= seconds * 20 + 5


def test_frames_tell_nothing_of_anyones_text(server: Server) -> None:
    with viewing(server, **{"x-request-id": "ernie"}) as viewer, server.client() as client:
        client.headers["x-request-id"] = "ernie-too"
        said = complete(
            client, "sesame street", user="oscar", cache_salt="grover", stop=["zoe-stops"], seed=987654321
        ).json()["choices"][0]["text"]
        asked = {
            "messages": [{"role": "user", "content": "elmo"}],
            "max_tokens": 8,
            "metadata": {"a": "kermit"},
        }
        reply = client.post("/v1/chat/completions", json=asked | {"safety_identifier": "piggy"})
        tag = reply.raise_for_status().headers["x-quire-tag"]
        viewer.wait(lambda: len(viewer.rows(tag)) >= 2)
        viewer.wait(lambda: len(viewer.groups) > 1)
        seen = "\n".join(viewer.lines)
        secrets = (
            "sesame",
            "oscar",
            "grover",
            "zoe",
            "987654321",
            "elmo",
            "kermit",
            "piggy",
            "ernie",
            "bert",
        )
        for secret in (*secrets, said.strip()):
            assert secret not in seen
        for frame in viewer.frames:
            told = {name: frame[name] for name in ("steps", "cache", "counts") if name in frame}
            words = set(strings(told)) - {*get_args(Bound), "ready"}
            assert all(TAG.fullmatch(word) for word in words), words


def test_a_viewer_needs_a_key_where_requests_do(tmp_path: Path) -> None:
    with running(QUIRE_API_KEY="s3same", before=REPLACED) as server:
        with server.client() as client:
            assert client.get("/page/events").status_code == 401
            assert client.get("/page/events", headers={"x-api-key": "wrong"}).status_code == 401
        with viewing(server, Authorization="Bearer s3same") as viewer:
            assert viewer.frames[0]["facts"]["keyed"] is True
            assert "s3same" not in "".join(viewer.lines)


def test_a_viewer_sees_the_engine_restarted(slow: Server) -> None:
    with viewing(slow) as viewer, slow.client() as client:
        complete(client, [5], 3)
        with pytest.raises(httpx.HTTPStatusError):
            complete(client, [KILL], 3)
        seen = len(viewer.frames)
        viewer.wait(lambda: any("facts" in frame for frame in viewer.frames[seen:]))
        viewer.wait(lambda: any(frame.get("cache") for frame in viewer.frames[seen:]))
        tag = complete(client, [6], 5).headers["x-quire-tag"]
        viewer.wait(lambda: len(viewer.rows(tag)) == 5)
        assert viewer.steps[-1]["index"] == 4


def test_a_viewer_who_leaves_is_gone(server: Server) -> None:
    """The log has a line for each request that has ended."""
    head = "GET /page/events HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: leaves-early\r\n\r\n"
    with socket.create_connection(address(server), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 20).startswith(b"HTTP/1.1 200")
        assert "leaves-early" not in server.log
    wait_for(lambda: "leaves-early" in server.log, 60, "the viewer left")


def test_a_head_is_answered_without_a_stream(client: httpx.Client) -> None:
    reply = client.head("/page/events")
    assert (reply.status_code, reply.headers["content-type"], reply.content) == (
        200,
        "application/x-ndjson",
        b"",
    )
    assert client.get("/health").status_code == 200  # on the same connection


def test_streams_end_properly_with_the_server() -> None:
    with running(*PLAIN, before=REPLACED) as server:
        with viewing(server) as viewer:
            answer = Background(server, {"prompt": [5], "max_tokens": 20, "ignore_eos": True})
            answer.first.wait(10)
            server.process.send_signal(signal.SIGTERM)
            assert viewer.ended.wait(10)
            assert viewer.error is None
            assert len(answer.end()) > 20
            num_rows = sum(step["num_rows"] for step in viewer.steps)
            assert num_rows > 10  # also while the server drained
        assert server.stop() == 0


def test_a_server_without_the_page_has_no_events() -> None:
    with running("--no-page") as server, server.client() as client:
        assert client.get("/page/events").status_code == 404
