"""The endpoint of recent steps, their metrics, and the ceilings that a server measures when it starts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server import running

from quire.engine.status import EngineStatus
from quire.server.steps import steps
from quire.simulation.law_file import read_law

PROMPT = "Once upon a time there was a fox"
SECRET = "sesame-street"
QUICKLY = """
import sys
from quire.roofline import probe
probe._SECONDS, probe.MEMORY_BYTES = 0.0, 1 << 20
from quire.server.engine_process import main
sys.exit(main())
"""


def complete(client: httpx.Client, max_tokens: int, prompt: str = PROMPT) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 2}
    client.post("/v1/completions", json=body).raise_for_status()


def test_the_last_steps_are_listed_with_their_verdicts(client: httpx.Client) -> None:
    complete(client, 60, f"{PROMPT} {SECRET}")
    found = client.get("/steps", params={"last": 15}).json()
    steps = found["steps"]
    assert len(steps) == 15
    assert [step["index"] for step in steps] == list(range(steps[0]["index"], steps[0]["index"] + 15))
    for step in steps:
        assert step["bound"] in ("cache", "memory", "bf16", "f32", "overhead", "sampling", "waiting")
        assert step["predicted_s"] > 0
        assert 0 < step["roof_share"] < 1  # of ceilings that are far too high
    assert sum(total["steps"] for total in found["bounds"]) == 15
    assert sum(total["device_s"] for total in found["bounds"]) == pytest.approx(
        sum(step["device_s"] for step in steps)
    )
    assert found["ceilings"]["memory_bytes_per_s"] == 1e13
    assert found["ceilings_age_s"] == pytest.approx(time.time() - 1.6e9, abs=60)
    assert found["ceiling_stale"] is False
    assert SECRET not in json.dumps(found)
    assert PROMPT not in json.dumps(found)


@pytest.mark.parametrize(("last", "count"), [(None, 100), ("0", 0), ("3", 3), ("999999999", None)])
def test_as_many_steps_as_asked_for(client: httpx.Client, last: str | None, count: int | None) -> None:
    complete(client, 120)
    reply = client.get("/steps", params={} if last is None else {"last": last})
    found = len(reply.json()["steps"])
    assert found == count if count is not None else found >= 120


@pytest.mark.parametrize("last", ["", "-1", "x", "1e3", "٣", "9" * 10])
def test_a_wrong_number_of_steps_is_refused(client: httpx.Client, last: str) -> None:
    reply = client.get("/steps", params={"last": last})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "last"


def test_metrics_add_up_the_time_by_bound(client: httpx.Client) -> None:
    complete(client, 20)
    lines = [line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    values = {name: float(value) for name, value, *_ in lines}

    def total(name: str) -> float:
        return sum(value for key, value in values.items() if key.startswith(f"quire:{name}"))

    assert {key.partition('bound="')[2].partition('"')[0] for key in values if "step_bound_s" in key} >= {
        *("memory", "cache", "int8", "bf16", "f32", "overhead", "sampling", "waiting", "unknown")
    }
    assert total("step_bound_seconds_total") >= total("step_device_seconds_total") > 0
    assert total("step_predicted_seconds_total") > 0
    assert total("step_roof_share_count") == total("engine_step_total")


def test_a_server_measures_its_machine_once(tmp_path: Path) -> None:
    """And says so, before the model is loaded; the next one knows."""
    command = (sys.executable, "-c", QUICKLY)
    before = "import functools, quire.server.lifecycle as l; "
    before += f"l.RemoteEngine = functools.partial(l.RemoteEngine, command={command!r})"
    for said in (True, False):
        with running(before=before, QUIRE_CACHE_DIR=str(tmp_path / "cache")) as server:
            assert ("measuring this machine, once" in server.log) == said
            with server.client() as client:
                found = client.get("/steps").json()
                chosen = client.get("/server_info").json()["chosen"]
        assert found["ceilings"]["f32_operations_per_s"] > 0
        assert 0 <= found["ceilings_age_s"] < 600
        assert "G operations a second, measured 20" in chosen["ceilings"]


def test_the_law_of_steps_is_a_file_for_simulations(client: httpx.Client, tmp_path: Path) -> None:
    for _ in range(50):  # it is fitted once there are enough steps of different kinds
        reply = client.get("/steps/law")
        if reply.json()["source"].startswith("calibrated"):
            break
        assert reply.json()["source"] == "assumed for the ceilings of the machine of demo"
        assert reply.json()["law"]["tail"] == 0
        complete(client, 100)
    (tmp_path / "law.json").write_bytes(reply.content)
    known = read_law(tmp_path / "law.json")
    assert known.source == "calibrated by the server of demo on its own steps, without clients"
    assert known.law.seconds(known.law.values([(10, 1)], 1)) > 0


def test_while_no_replica_runs_there_are_no_steps() -> None:
    """Such as when all were given up, and others start in their places."""
    several = SimpleNamespace(statuses={}, status=EngineStatus())
    service: Any = SimpleNamespace(engine=several, replicas=several, first=0, first_status=several.status)
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    request: Any = SimpleNamespace(app=app, query_params={})
    assert json.loads(asyncio.run(steps(request)).body)["steps"] == []


def test_without_ceilings_there_is_no_law() -> None:
    with running("--device", "reference") as server, server.client() as client:
        reply = client.get("/steps/law")
    assert reply.status_code == 404
    assert "quire probe" in reply.json()["error"]["message"]
