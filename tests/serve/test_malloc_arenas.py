"""Memory that was freed does not stay with the processes."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from requests_over_http import wait_for
from server import running

from quire.config import EngineConfig
from quire.server import engine_messages as messages
from quire.server import engine_process, malloc_arenas

BEFORE = (
    "import quire.server.malloc_arenas as h; h.PERIOD_S = 0.2; h.trim = lambda: print('trimmed', flush=True)"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")


@GLIBC
def test_whole_pages_go_back() -> None:
    """Also those between others that are in use, which free() alone keeps."""
    objects = [bytes(3000) for _ in range(30_000)]
    kept = objects[99::100]
    del objects
    full = resident_bytes()
    malloc_arenas.trim()
    assert full - resident_bytes() > 40 << 20
    assert len(kept) == 300


@GLIBC
def test_threads_share_one_heap() -> None:
    code = (
        "import threading; from quire.server import malloc_arenas; {}; hold = bytearray(5000)\n"
        "thread = threading.Thread(target=lambda: bytearray(5000)); thread.start(); thread.join()\n"
        "import ctypes; ctypes.CDLL(None).malloc_stats()"
    )
    for call, count in (("malloc_arenas.share()", 1), ("pass", 2)):
        done = subprocess.run([sys.executable, "-c", code.format(call)], capture_output=True, text=True)
        assert done.stderr.count("Arena ") == count


def test_the_server_has_one_heap() -> None:
    with running(
        before="import quire.server.malloc_arenas as h; h.share = lambda: print('shared', flush=True)"
    ) as server:
        wait_for(lambda: "shared" in server.log, 60, "it shares")


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_do_not_wait_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(Cycle())
        assert gone() is not None
        for _ in range(malloc_arenas.COLLECTED_EVERY):
            malloc_arenas.trim()
        assert gone() is None
    finally:
        gc.enable()


def test_the_server_trims_now_and_then() -> None:
    with running(before=BEFORE) as server:
        wait_for(lambda: server.log.count("trimmed") > 2, 60, "it trims")


def test_the_engine_trims_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    received: list[list[messages.EngineMessage]] = [[messages.Start(EngineConfig())], [], []]

    def receive(wait_s: float | None) -> list[messages.EngineMessage]:
        if not received:
            raise EOFError
        return received.pop(0)

    engine = SimpleNamespace(wait_s=None, exchange=None, close=lambda: None)
    built = SimpleNamespace(engine=engine, adapters=None)
    monkeypatch.setattr(engine_process, "_load", lambda *_: built)
    monkeypatch.setattr(malloc_arenas, "trim", lambda: trims.append(1))
    monkeypatch.setattr(malloc_arenas, "PERIOD_S", 0.0)
    with pytest.raises(EOFError):
        engine_process.serve(SimpleNamespace(receive=receive, send=None), lambda *_: None)  # type: ignore[arg-type]
    assert len(trims) == 3
