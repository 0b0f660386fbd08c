"""`quire serve --replicas 2`: the same answers, and what is told of replicas and of the router."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import Server, running

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """A server with two replicas that drains for a moment only, and asks for a key."""
    flags = ("--replicas", "2", "--drain-timeout-s", "0", "--max-model-len", "1024")
    with running(*flags, QUIRE_API_KEY="secret") as server:
        yield server


@pytest.fixture
def two(pair: Server) -> Iterator[httpx.Client]:
    with pair.client(headers=KEY) as client:
        yield client


def ask(client: httpx.Client, prompt: str, **fields: Any) -> Any:
    """A completion, whole."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "seed": 7, "logprobs": 2, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


PROMPTS = [f"{word} was asked to tell a story about number {i}, and" for i, word in enumerate("abcdefgh")]


def until(condition: Callable[[], object], limit_s: float = 30) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def settled(client: httpx.Client) -> dict[str, Any]:
    """The replicas once no operation runs."""

    def ended() -> bool:
        operation = client.get("/replicas").json()["operation"]
        return operation is None or operation["seconds"] is not None

    until(ended)
    found: dict[str, Any] = client.get("/replicas").json()
    assert found["operation"] is None or found["operation"]["error"] is None
    return found


def all_at_once(client: httpx.Client, meanwhile: Callable[[], None] | None = None) -> list[Any]:
    """The answers to all prompts, which are sent together."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(ask, client, prompt) for prompt in PROMPTS]
        if meanwhile is not None:
            meanwhile()
        return [answer.result() for answer in answers]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Any]:
    """The answers of a server with one engine."""
    with server.client() as client:
        return [ask(client, prompt) for prompt in PROMPTS]


def test_each_replica_has_its_own_cores(two: httpx.Client) -> None:
    found = settled(two)
    assert (found["num_places"], found["autoscaling"]) == (2, None)
    first, second = found["replicas"]
    assert (first["number"], second["number"]) == (0, 1)
    assert set(first["cpus"]).isdisjoint(second["cpus"])
    for one in (first, second):
        assert os.sched_getaffinity(one["pid"]) == set(one["cpus"])
        assert Path(f"/proc/{one['pid']}/comm").read_text().strip() == "quire-engine"
        assert (one["health"], one["num_open"]) == ("ready", 0)
    words = two.get("/server_info").json()["chosen"]["replicas"]
    assert words.startswith("2 (0: cpu ")
    load = two.get("/load").json()
    assert load["num_blocks"] == first["num_blocks"] + second["num_blocks"]


def test_answers_are_those_of_one_engine(two: httpx.Client, expected: list[Any]) -> None:
    assert all_at_once(two) == expected
    decisions = two.get("/router/decisions", params={"last": len(PROMPTS)}).json()
    assert {one["replica"] for one in decisions["decisions"]} == {0, 1}


def test_no_request_is_lost_while_all_are_replaced(two: httpx.Client, expected: list[Any]) -> None:
    before = {one["pid"] for one in settled(two)["replicas"]}

    def replace_all() -> None:
        answer = two.post("/replicas/restart")
        assert answer.status_code == 202, answer.text
        assert answer.json()["operation"]["what"] == "restarting all replicas"
        again = two.post("/replicas/0/restart")
        assert again.status_code == 409
        assert "has not ended" in again.json()["error"]["message"]

    assert all_at_once(two, replace_all) == expected
    after = settled(two)
    assert before.isdisjoint({one["pid"] for one in after["replicas"]})
    assert all_at_once(two) == expected


def test_scaling_down_and_up(two: httpx.Client, expected: list[Any]) -> None:
    for count in (1, 2):

        def scale(count: int = count) -> None:
            assert two.post("/replicas", json={"count": count}).status_code == 202

        assert all_at_once(two, scale) == expected
        assert [one["number"] for one in settled(two)["replicas"]] == list(range(count))
        if count == 1:
            alone = two.post("/replicas/0/restart")
            assert alone.status_code == 409
            assert "no other replica would serve" in alone.json()["error"]["message"]
            assert two.get("/health").status_code == 200
    for count in (0, 3):
        refused = two.post("/replicas", json={"count": count})
        assert refused.status_code == 400
        assert "from 1 to 2" in refused.json()["error"]["message"]


def test_a_replica_that_is_killed_is_not_noticed(two: httpx.Client, expected: list[Any]) -> None:
    """By requests. It is started again by itself."""
    pid = settled(two)["replicas"][1]["pid"]
    killing = threading.Timer(0.05, os.kill, (pid, 9))
    assert all_at_once(two, killing.start) == expected
    killing.join()

    def back() -> bool:
        one = two.get("/replicas").json()["replicas"][1]
        return one["health"] == "ready" and one["pid"] != pid

    until(back)
    assert two.get("/replicas").json()["replicas"][1]["num_restarts"] == 1


def test_requests_follow_their_prefix(two: httpx.Client) -> None:
    """As soon as both replicas know how long steps take: one without any is taken to be at its ceilings."""
    settled(two)
    prompt = "Once there was a " + "very " * 60 + "long story"
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}

    def served() -> Any:
        timings = two.post("/v1/completions", json=body).json()["timings"]
        (decision,) = two.get("/router/decisions", params={"last": 1}).json()["decisions"]
        assert decision["replica"] == timings["replica"]
        return timings | decision

    until(lambda: served()["no_affinity"] == "")
    first, *others = [served() for _ in range(4)]
    for one in (first, *others):
        assert (one["no_affinity"], one["replica"]) == ("", first["replica"])
        assert one["cached_tokens"] > 0
        assert one["num_blocks"] == one["num_prompt_blocks"] > 2
        assert {candidate["replica"] for candidate in one["candidates"]} == {0, 1}
    found = two.get("/router/decisions", params={"last": 3}).json()
    assert found["num_decisions"] == sum(found["num_by_reason"].values())
    assert found["num_matched_blocks"] <= found["num_prompt_blocks"]


def test_metrics_have_the_number_of_the_replica(two: httpx.Client) -> None:
    settled(two)
    all_at_once(two)
    text = two.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "quire:engine_step_total"):
        for engine in "01":
            assert f'{name}{{engine="{engine}",model_name="demo"}}' in text
    assert 'quire:router_decisions_total{engine="' in text
    assert 'quire:router_matched_blocks_total{model_name="demo"}' in text


def test_steps_are_those_of_one_replica(two: httpx.Client) -> None:
    settled(two)
    all_at_once(two)
    assert two.get("/steps").json()["replica"] == 0
    for number in (0, 1):
        found = two.get("/steps", params={"replica": number, "last": 5}).json()
        assert found["replica"] == number
        assert len(found["steps"]) == 5
    refused = two.get("/steps", params={"replica": 7})
    assert refused.status_code == 400
    assert "replica must be one of 0, 1" in refused.json()["error"]["message"]


def test_the_page_watches_the_first(two: httpx.Client) -> None:
    settled(two)
    with two.stream("GET", "/page/events") as events:
        frame = json.loads(next(events.iter_lines()))
    assert frame["facts"]["chosen"]["replicas"].startswith("2 (0: cpu ")
    first = two.get("/replicas").json()["replicas"][0]
    assert frame["facts"]["num_blocks"] == frame["counts"]["num_blocks"] == first["num_blocks"]


def test_all_of_it_needs_the_key(pair: Server) -> None:
    with pair.client() as client:
        for path in ("/replicas", "/router/decisions"):
            assert client.get(path).status_code == 401
        for path in ("/replicas", "/replicas/restart", "/replicas/0/restart"):
            assert client.post(path, json={}).status_code == 401


def test_unknown_replicas(two: httpx.Client) -> None:
    assert two.post("/replicas/5/restart").status_code == 404
    assert two.post("/replicas/x/restart").status_code == 404


def test_one_engine_has_none_of_it(server: Server) -> None:
    with server.client() as client:
        assert client.get("/replicas").status_code == 404
        assert client.get("/router/decisions").status_code == 404
        assert "replica" not in client.get("/steps").json()
        body = {"model": "demo", "prompt": "a", "max_tokens": 1}
        assert "replica" not in client.post("/v1/completions", json=body).json()["timings"]
        assert "router_" not in client.get("/metrics").text
        assert "replicas" not in client.get("/server_info").json()["chosen"]


def test_the_number_of_replicas_follows_the_load() -> None:
    """One of two places is used at first. What the load then does is tested without measured times."""
    with running("--replicas", "1-2", "--ttft-goal", "60s") as server, server.client() as client:
        found = client.get("/replicas").json()
        assert [one["number"] for one in found["replicas"]] == [0]
        assert found["num_places"] == 2
        goals = {"ttft_goal_s": 60.0, "itl_goal_s": None}
        assert found["autoscaling"] == {"least": 1, "most": 2, "changes": [], **goals}
        refused = client.post("/replicas", json={"count": 2})
        assert refused.status_code == 409
        assert "follows the load" in refused.json()["error"]["message"]
        assert len(ask(client, PROMPTS[0])) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "1000"), "replicas = 1,000, but this machine has"),
        (("--replicas", "2", "--num-threads", "64"), "each of 2 replicas has"),
        (("--replicas", "2", "--record", "incidents"), "cannot be recorded"),
        (("--replicas", "1-2"), "from 1 to 2 need a latency goal to be scaled by"),
        (("--replicas", "1-1000", "--ttft-goal", "1s"), "replicas = 1,000, but this machine has"),
    ],
)
def test_what_cannot_be(flags: tuple[str, ...], words: str) -> None:
    failed = Server(*flags)
    assert failed.stop(0) == 1
    assert words in failed.log
