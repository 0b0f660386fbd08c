"""A real server in a process of its own, at a free port, with the demo model."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_S = 60.0
_URL = re.compile(r"(https?://[^\s/]+)/v1")
# The one that quire is installed in: clients may have an environment of their own.
PYTHON = os.environ.get("QUIRE_TEST_PYTHON") or sys.executable
# Ceilings that no machine has: all plan alike, and no server measures its own for three seconds.
CEILINGS = """
from quire.backends.native import _core
from quire.roofline import probe
operations = dict.fromkeys(probe.KINDS, 1e15)
read_bytes = {count: dict.fromkeys(("L1", "memory"), 1e13) for count in (1, 2)}
for isa in _core.isas():
    for threads in (1, 2):
        probe.keep(probe.Ceilings(probe.cpu_name(), isa, threads, operations, read_bytes, 1.6e9))
"""


@functools.cache
def cache_folder() -> str:
    """Return the cache of all servers of this process, which has ceilings."""
    folder = tempfile.mkdtemp(prefix="quire-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([PYTHON, "-c", CEILINGS], check=True, env={**os.environ, "QUIRE_CACHE_DIR": folder})
    return folder


def asked_flags() -> tuple[str, ...]:
    """Return the flags of session servers: QUIRE_TEST_REPLICAS=2 runs tests with so many replicas."""
    count = os.environ.get("QUIRE_TEST_REPLICAS")
    return ("--replicas", count) if count else ()


class Server:
    """`quire serve` with these flags; `url` has no path. Other keywords are variables of its environment.

    `before` is Python that its process runs first.
    """

    def __init__(self, *flags: str, model: str | None = "demo", before: str = "", **environment: str) -> None:
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by stop
        command = [
            PYTHON,
            "-c",
            f"{before}\nfrom quire.cli.main import main; main()",
            "serve",
            *([model] if model else []),
        ]
        command += ["--port", "0", "--num-threads", "1", *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "QUIRE_OFFLINE": "1", "QUIRE_CACHE_DIR": cache_folder(), **environment},
        )
        self.url = self._last_log = ""

    def wait_until_ready(self) -> None:
        """Wait for the line with the URL; AssertionError with the log when it does not come."""
        end = time.monotonic() + START_S
        while not (found := _URL.search(self.log)):
            assert self.process.poll() is None, f"the server ended: {self.log}"
            assert time.monotonic() < end, f"the server is not ready: {self.log}"
            time.sleep(0.02)
        self.url = found[1]

    @property
    def log(self) -> str:
        """All that was written to standard output and error."""
        if self._output.closed:
            return self._last_log
        return Path(f"/proc/self/fd/{self._output.fileno()}").read_text("utf-8")

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, the child of that name."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}
        return next(child for child, name in names.items() if name == "quire-engine")

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client whose paths begin at the server's root."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def load(self) -> dict[str, int]:
        """What /load says."""
        with self.client() as client:
            found: dict[str, int] = client.get("/load").json()
        return found

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """End it by a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self._last_log = self.log
            self._output.close()


@contextmanager
def running(*flags: str, **keywords: Any) -> Iterator[Server]:
    """A server that is ready, and gone at the end. Arguments are those of Server."""
    server = Server(*flags, **keywords)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
    assert "Traceback" not in server.log, server.log
