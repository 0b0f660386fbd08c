"""A server with --record: incident files of deaths, failed requests and on request, and their replay."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from faulty_engine import FAIL, KILL
from remote_engines import NULL, faulty, follow, request, run, running, until
from server import running as running_server

from quire.errors import EngineDead
from quire.recording.entries import Planned
from quire.recording.incident import Recording, read_incident
from quire.recording.recorder import Recorder
from quire.recording.replay import replay

KEY = "sk-secret-0123456789"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.quire-incident"))


def replay_file(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "quire", "replay", str(path), *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def last_plan(recording: Recording) -> Planned:
    return [entry for entry in recording.entries() if isinstance(entry, Planned)][-1]


def test_a_death_leaves_the_step_that_was_fatal(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"

    async def check() -> None:
        recorder = Recorder(str(folder))
        async with running(NULL, command=faulty(1), recorder=recorder) as engine:
            await follow(engine.submit(request("before", 5, 6, 7)))
            with pytest.raises(EngineDead):  # after the second death, which writes no second file
                await follow(engine.submit(request("fatal", KILL, 6)))
            await until(lambda: files(folder))
            await until(lambda: engine.status.state == "ready")
            await follow(engine.submit(request("after", 5, 6, 7)))
            await recorder.write("on request")

    run(check())
    death, later = files(folder)
    recording = read_incident(death)
    assert recording.incident.reason == "the engine died"
    result = replay(recording, None)
    plan = last_plan(recording)
    assert result.equal
    assert plan.composition is not None
    assert result.open_steps == (plan.composition.number,)
    assert replay(read_incident(later), None).num_steps == 16  # of the new engine alone


def test_a_failed_request_writes_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"

    async def check() -> None:
        async with running(NULL, command=faulty(1), recorder=Recorder(str(folder))) as engine:
            (output,) = await follow(engine.submit(request("bad", FAIL, 6)))
            assert output.error is not None

    run(check())
    (path,) = files(folder)
    recording = read_incident(path)
    assert recording.incident.reason == "a request failed"
    result = replay(recording, None)
    assert (result.equal, result.num_steps, result.open_steps) == (True, 1, ())


def test_a_server_writes_incident_files_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"
    flags = ("--record", str(folder), "--record-contents", "--max-model-len", "256")
    with running_server(*flags, QUIRE_API_KEY=KEY) as server:
        with server.client() as client:
            assert client.post("/incidents").status_code == 401
        with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
            early = client.post("/incidents")
            assert early.status_code == 400
            answer = client.post("/v1/chat/completions", json=CHAT).json()
            written = client.post("/incidents")
        assert "steps are recorded, with prompts and answers" in server.log
    assert written.status_code == 201
    (path,) = files(folder)
    assert written.json() == {"file": path.name, "bytes": path.stat().st_size}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY.encode() not in path.read_bytes()
    done = replay_file(path)
    num_tokens = answer["usage"]["completion_tokens"]
    assert f"{num_tokens} steps, {num_tokens} tokens: equal" in done.stdout, done
    assert done.returncode == 0


def test_without_recording_there_is_nothing_to_write(client: httpx.Client) -> None:
    reply = client.post("/incidents")
    assert reply.status_code == 404
    assert "--record" in reply.text
