"""The endpoint of experiments: who may start one, when, and how its process ends."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from server import Server, running

from quire.errors import Overloaded, QuireError
from quire.experiments.parameters import CacheParameters
from quire.server.page import experiments
from quire.server.service import ServiceState

PATH = "/page/experiments/"
SMALL = {"prompt_tokens": 16, "num_tokens": 2}
LONG = {"prompt_tokens": 768, "num_tokens": 64}
STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "n": 8}


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reply.text.splitlines()]


def processes(server: Server) -> list[int]:
    """The processes of experiments of a server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and b"quire.experiments" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            pass
    return found


def wait_until_gone(server: Server) -> None:
    end = time.monotonic() + 10
    while processes(server):
        assert time.monotonic() < end, "the process of the experiment is still there"
        time.sleep(0.01)


def wait_until_idle(client: httpx.Client) -> None:
    end = time.monotonic() + 10
    while (load := client.get("/load").json())["num_requests_running"] or load["num_requests_waiting"]:
        assert time.monotonic() < end, "the requests of another test still run"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "asked", "kind"),
    [
        ("cache", SMALL, "token"),
        ("quantization", {"num_tokens": 8, "rounds": 1}, "kind"),
        ("heads", {"batch": 1, "context": 16, "num_tokens": 4}, "heads"),
        ("fleet", {"replicas": 1, "num_requests": 20}, "size"),
    ],
)
def test_an_experiment_streams_lines(
    client: httpx.Client, server: Server, name: str, asked: dict[str, int], kind: str
) -> None:
    reply = client.post(PATH + name, json=asked)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(reply)
    assert kind in {key for line in lines for key in line}
    assert list(lines[-1]) == ["done"]
    assert not any("error" in line for line in lines)
    wait_until_gone(server)


def test_a_fleet_has_the_law_of_the_server(client: httpx.Client) -> None:
    reply = client.post(f"{PATH}fleet", json={"replicas": 1, "num_requests": 20})
    assert lines_of(reply)[0]["setup"]["law"] == client.get("/steps/law").json()["source"]


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("cache", {"prompt_tokens": 15}, "prompt_tokens"),
        ("cache", {"num_tokens": 65}, "num_tokens"),
        ("quantization", {"rounds": "x"}, "rounds"),
        ("heads", {"batch": 1.5}, "batch"),
        ("fleet", {"load": 0}, "load"),
        ("fleet", {"replicas": 33}, "replicas"),
        ("fleet", {"num_requests": 1201}, "num_requests"),
        ("fleet", {"autoscaling": "on"}, "autoscaling"),
        ("cache", {"colour": 1}, None),
        ("cache", [], None),
    ],
)
def test_wrong_parameters_are_refused(client: httpx.Client, name: str, body: Any, param: str | None) -> None:
    reply = client.post(PATH + name, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_what_the_server_adds_cannot_be_asked_for(client: httpx.Client) -> None:
    reply = client.post(f"{PATH}fleet", json={"served": {}})
    assert reply.status_code == 400
    assert "served" in reply.text


def test_there_is_no_other_experiment(client: httpx.Client) -> None:
    assert client.post(f"{PATH}cats", json={}).status_code == 404


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_a_viewer_behind_a_proxy_is_refused(client: httpx.Client, header: str) -> None:
    reply = client.post(f"{PATH}cache", json=SMALL, headers={header: "127.0.0.1"})
    assert reply.status_code == 403
    assert "API key" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("client", "keyed", "tenant", "allowed"),
    [
        ("127.0.0.1", False, "", True),
        ("::1", False, "", True),
        ("192.0.2.1", False, "", False),
        (None, False, "", False),
        ("192.0.2.1", True, "ab", True),
        ("127.0.0.1", True, "", False),
    ],
)
def test_viewers_are_on_this_machine_or_have_a_key(
    client: str | None, keyed: bool, tenant: str, allowed: bool
) -> None:
    scope = {"client": client and (client, 1), "headers": [], "state": {"tenant": tenant}}
    assert experiments.may_start(scope, cast(ServiceState, SimpleNamespace(keyed=keyed))) is allowed


@pytest.mark.parametrize(("name", "asked"), [("cache", LONG), ("fleet", {"replicas": 32})])
def test_one_runs_at_a_time_and_ends_when_its_viewer_leaves(
    server: Server, client: httpx.Client, name: str, asked: dict[str, int]
) -> None:
    with server.client() as first, first.stream("POST", f"{PATH}{name}", json=asked) as reply:
        lines = reply.iter_lines()  # the connection is closed with it
        next(lines)
        (pid,) = processes(server)
        assert os.getpriority(os.PRIO_PROCESS, pid) == experiments.LOWEST_PRIORITY
        second = client.post(f"{PATH}cache", json=SMALL)
        assert second.status_code == 503
        assert int(second.headers["retry-after"]) > 0
        assert "another experiment" in second.json()["error"]["message"]
    wait_until_gone(server)
    assert client.post(f"{PATH}cache", json=SMALL).status_code == 200


def test_none_runs_under_load(server: Server, client: httpx.Client) -> None:
    with (
        server.client() as other,
        other.stream("POST", "/v1/completions", json={**STORY, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        refused = client.post(f"{PATH}cache", json=SMALL)
    assert refused.status_code == 503
    assert "the server is busy" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize("asked", [STORY, {**STORY, "n": 1, "max_tokens": 1}])
def test_one_that_runs_gives_way_to_requests(
    server: Server, client: httpx.Client, asked: dict[str, Any]
) -> None:
    wait_until_idle(client)
    with server.client() as other, other.stream("POST", f"{PATH}cache", json=LONG) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=asked))
        asking.start()
        rest = [json.loads(line) for line in lines]
        asking.join()
    assert "the server is busy" in rest[-1]["error"]["message"]
    wait_until_gone(server)


def test_there_are_none_without_the_page() -> None:
    with running("--no-page") as server, server.client() as client:
        assert client.post(f"{PATH}cache", json=SMALL).status_code == 404


class Idle(SimpleNamespace):
    """What an experiment uses of the service of an idle server."""

    def __init__(self) -> None:
        engine = SimpleNamespace(status=SimpleNamespace(has_work=False, steps=0))
        super().__init__(engine=engine, num_queued_requests=0, draining=False, is_experimenting=False)


async def _all(lines: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [line async for line in lines]


def run(name: str, service: Idle) -> list[bytes]:
    task = CacheParameters(prompt_tokens=16, num_tokens=2)
    found = asyncio.run(_all(experiments.lines(cast(ServiceState, service), name, task)))
    assert not service.is_experimenting
    return found


def test_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, children: Any) -> None:
    monkeypatch.setattr(experiments, "MAX_S", 0.0)
    with pytest.raises(QuireError, match="after 0 s"):
        run("cache", Idle())


def test_one_that_dies_is_an_error(children: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(QuireError, match="ended with status 1"):
        run("no such experiment", Idle())
    assert "KeyError" in caplog.text


def test_none_is_begun_while_the_server_ends() -> None:
    service = Idle()
    service.draining = True
    with pytest.raises(Overloaded, match="shutting down"):
        run("cache", service)
