"""Traces of a server: what `GET /trace` returns, beside what the answers said of themselves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from server import Server, running
from test_incident_files import Filled
from test_track_events import slices_of

from quire.errors import Overloaded, QuireError
from quire.recording import recorder as recorder_module

PHASES = {"queue", "prefill", "decode", "preempted"}


def test_the_slices_of_a_trace_are_the_receipts(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with running("--record", str(folder)) as server, server.client() as client:
        assert client.get("/trace").status_code == 400  # nothing was recorded yet
        asked = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 40}
        timings = client.post("/v1/chat/completions", json=asked).json()["timings"]
        reply = client.get("/trace", params={"last": "3600s"})
        assert reply.status_code == 200
        assert client.get("/trace", params={"last": "3601s"}).status_code == 400
        assert client.get("/trace", params={"last": "2h"}).status_code == 400
        assert list(folder.iterdir()) == []
    assert b"fox" not in reply.content
    found = slices_of(Trace.FromString(reply.content))
    taken_ms = {name: (end - begin) / 1e6 for track, name, begin, end, _ in found if track == "lane 1"}
    for phase in PHASES & taken_ms.keys():
        assert taken_ms[phase] == pytest.approx(timings[f"{phase}_ms"], abs=25), phase
    assert taken_ms["decode"] > 0
    tokens = [name for track, name, *_ in found if track == "slot 0" and name == "decode"]
    assert len(tokens) == timings["completion_tokens"] - 1 - timings["accepted_tokens"]
    steps = [name for track, name, *_ in found if track == "steps"]
    assert len(steps) == len(tokens) + 1


def test_without_a_recording_there_is_no_trace(server: Server, client: httpx.Client) -> None:
    reply = client.get("/trace")
    assert reply.status_code == 404
    assert "--record" in reply.text


def test_one_trace_is_made_at_a_time(tmp_path: Path, children: list[asyncio.subprocess.Process]) -> None:
    recorder = Filled(tmp_path / "a").recorder

    async def check() -> None:
        first = asyncio.create_task(recorder.trace(30.0))
        while not children:
            await asyncio.sleep(0.001)
        assert os.getpriority(os.PRIO_PROCESS, children[0].pid) > os.getpriority(os.PRIO_PROCESS, 0)
        with pytest.raises(Overloaded, match="another trace"):
            await recorder.trace(30.0)
        for trace in (first, recorder.trace(30.0)):
            with pytest.raises(QuireError, match="no trace was made: recorded by Quire 1, build b"):
                await trace

    asyncio.run(check())
    assert list((tmp_path / "a").iterdir()) == []


def test_a_trace_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[asyncio.subprocess.Process]
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_TRACE_S", 0.01)
    with pytest.raises(QuireError, match=r"in 0\.01 s"):
        asyncio.run(Filled(tmp_path / "a").recorder.trace(30.0))
    assert children[0].returncode != 0
    assert list((tmp_path / "a").iterdir()) == []


def test_a_measurement_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    flags = ("--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4")
    command = [sys.executable, "-m", "quire", "bench", "demo", *flags, "--trace", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    found = slices_of(Trace.FromString(path.read_bytes()))
    requests = {name for track, name, *_ in found if track.startswith("lane") and name not in PHASES}
    assert len(requests) >= 3


def test_a_server_that_keeps_no_trace_is_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    command = [sys.executable, "-m", "quire", "bench", "--base-url", server.url, "--trace", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "--record" in done.stderr
    assert not path.exists()
