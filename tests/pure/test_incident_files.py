"""The ring in memory, the files written from it, and reading them as untrusted input."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import time

import msgspec
import pytest
from test_recording import Numbers, run_history

from quire.errors import ConfigError, RequestError
from quire.recording import recorder as recorder_module
from quire.recording.incident import MAGIC, Incident, read_incident, write_incident
from quire.recording.recorder import Recorder
from quire.recording.replay import replay
from quire.recording.ring import Ring

NOW = 100.0


def make_ring(max_bytes: int = 100, max_age_s: float = 60.0) -> Ring:
    ring = Ring(max_bytes, max_age_s)
    ring.take(b"header", "header", NOW)
    return ring


def test_the_ring_drops_whole_epochs():
    ring = make_ring()
    for number in range(6):
        ring.take(b"%d" % number * 15, "epoch", NOW)
        ring.take(b"%d" % number * 15, "more", NOW)
        assert ring.num_bytes <= 100
    assert ring.chunks(NOW) == [b"%d" % number * 15 for number in (3, 3, 4, 4, 5, 5)]


def test_the_ring_drops_what_is_old_without_new_chunks():
    ring = make_ring()
    ring.take(b"old", "epoch", NOW)
    ring.take(b"new", "epoch", NOW + 50)
    assert ring.chunks(NOW + 61) == [b"new"]
    assert ring.chunks(NOW + 111) == []


def test_an_epoch_that_alone_is_too_large_is_dropped_with_all_that_follows_it():
    ring = make_ring()
    ring.take(b"a", "epoch", NOW)
    ring.take(b"b" * 100, "more", NOW)
    ring.take(b"c", "more", NOW)
    assert ring.chunks(NOW) == []
    assert ring.num_bytes == 0
    ring.take(b"d", "epoch", NOW)
    assert ring.chunks(NOW) == [b"d"]


def test_another_engine_begins_anew():
    ring = make_ring()
    ring.take(b"a", "epoch", NOW)
    ring.take(b"another", "header", NOW)
    ring.take(b"b", "more", NOW)
    assert (ring.header, ring.chunks(NOW)) == (b"another", [])


class Filled:
    """A recorder with a history in it, in a folder."""

    def __init__(self, folder, contents: bool = False) -> None:
        self.now = NOW
        self.recorder = Recorder(str(folder), contents=contents, clock=lambda: self.now)
        recorded = run_history(contents)
        recording = recorded.recordings_of_it()
        self.recorder.take(msgspec.msgpack.encode(recording.header), "header")
        for chunk, kind in recorded.chunks:
            self.recorder.take(chunk, kind)

    def write(self, reason: str = "on request"):
        return asyncio.run(self.recorder.write(reason))


@pytest.mark.parametrize("contents", [True, False])
def test_a_file_is_private_and_replays(tmp_path, contents):
    old = os.umask(0)
    try:
        written = Filled(tmp_path / "a" / "b", contents).write()
    finally:
        os.umask(old)
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.path.parent.stat().st_mode) == 0o700
    assert written.num_bytes == written.path.stat().st_size
    assert [path.name for path in written.path.parent.iterdir()] == [written.path.name]
    recording = read_incident(written.path)
    assert recording.incident.reason == "on request"
    assert replay(recording, Numbers() if contents else None).equal


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="others may enter"):
        Recorder(str(tmp_path / "open"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Recorder(str(tmp_path / "file"))


def test_nothing_is_written_before_anything_is_recorded(tmp_path):
    with pytest.raises(RequestError, match="nothing was recorded"):
        asyncio.run(Recorder(str(tmp_path / "a")).write("now"))


def test_files_written_at_once_have_their_own_names(tmp_path, monkeypatch):
    def slowly(*what) -> int:
        time.sleep(0.05)
        return write_incident(*what)

    monkeypatch.setattr(recorder_module, "write_incident", slowly)
    recorders = [Filled(tmp_path / "a").recorder for _ in range(2)]  # as of two models of a server

    async def several() -> list[str]:
        writing = (recorders[number % 2].write(f"reason {number}") for number in range(3))
        written = await asyncio.gather(*writing)
        return [read_incident(one.path).incident.reason for one in written]

    assert asyncio.run(several()) == ["reason 0", "reason 1", "reason 2"]


def test_files_are_bounded_in_number(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_FILES", 3)
    filled = Filled(tmp_path / "a")
    names = {filled.write().path.name for _ in range(3)}
    assert len(names) == 3
    with pytest.raises(RequestError, match="3 incident files already"):
        filled.write()


def test_of_many_faults_one_is_reported_a_minute(tmp_path):
    filled = Filled(tmp_path / "a")

    async def report(times: int) -> None:
        for _ in range(times):
            filled.recorder.report("a request failed")
        await filled.recorder.close()

    asyncio.run(report(5))
    filled.now += 30
    asyncio.run(report(5))
    assert len(list((tmp_path / "a").iterdir())) == 1
    filled.now += 31
    asyncio.run(report(1))
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_a_fault_before_anything_was_recorded_does_not_hide_the_next(tmp_path):
    recorder = Recorder(str(tmp_path / "a"), clock=lambda: NOW)

    async def report() -> None:
        recorder.report("the engine died")
        for chunk, kind in ((b"header", "header"), (b"epoch", "epoch")):
            recorder.take(chunk, kind)
        recorder.report("a request failed")
        await recorder.close()

    asyncio.run(report())
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "x.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="File exists"):
        write_incident(tmp_path / "x.quire-incident", Incident("", 0.0), b"", [])
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "x.partial").is_symlink()


def framed(*messages: bytes) -> bytes:
    return MAGIC + b"".join(struct.pack(">I", len(message)) + message for message in messages)


INCIDENT = msgspec.msgpack.encode(Incident("r", 1.0))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not an incident file"),
        (b"GGUF" * 10, "not an incident file"),
        (MAGIC, "ends before the first epoch"),
        (MAGIC + b"\x00", "ends within a frame"),
        (MAGIC + b"\xff\xff\xff\xff", "ends within a frame"),
        (framed(b"\xc0", b"\xc0", b"\xc0"), "incident"),
        (framed(INCIDENT, b"\xc0", b"\xc0"), "header"),
    ],
)
def test_what_is_no_incident_file_is_refused(tmp_path, content, problem):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_incident(path)


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 1 << 40},
        {"block_size": 0},
        {"max_num_seqs": "many"},
        {"max_num_seqs": float("inf")},
        {"max_model_len": 1 << 60},
        {"max_model_len": None},
        {"vocab_size": 0},
        {"groups": [[1 << 40]]},
        {"groups": [[-1]]},
    ],
)
def test_sizes_that_no_engine_has_are_refused(tmp_path, change):
    filled = Filled(tmp_path / "a")
    path = filled.write().path
    recording = read_incident(path)
    fields = msgspec.to_builtins(recording.header)
    for name, value in change.items():
        (fields if name in fields else fields["arguments"])[name] = value
    path.write_bytes(framed(INCIDENT, msgspec.msgpack.encode(fields), *map(bytes, recording.chunks)))
    with pytest.raises(ConfigError, match="header"):
        read_incident(path)


@pytest.mark.parametrize("written_s", [-1.0, 1e300, float("inf"), float("nan")])
def test_a_time_that_no_calendar_has_is_refused(tmp_path, written_s):
    path = Filled(tmp_path / "a").write().path
    recording = read_incident(path)
    parts = Incident("r", written_s), recording.header
    path.write_bytes(framed(*map(msgspec.msgpack.encode, parts), *map(bytes, recording.chunks)))
    with pytest.raises(ConfigError, match="incident: the time it was written is out of range"):
        read_incident(path)
