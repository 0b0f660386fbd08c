"""A Quire server as a process of this machine: started, looked at through /proc, ended. Linux only."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.bench.http_client import Client, Lost
from quire.bench.http_reply import BadReply
from quire.bench.openai_api import Unusable

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_S = os.sysconf("SC_CLK_TCK")
ENGINE = "quire-engine"  # how the engine's process calls itself
T = TypeVar("T")
POLL_S = 0.1
READY_S, END_S = 120.0, 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of a process now. `cpu_s` is its processor time since its start, user and system."""

    rss_bytes: int
    num_fds: int
    num_threads: int
    cpu_s: float


def usage(pid: int) -> Usage | None:
    """None for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        num_fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_S
    return Usage(int(fields[21]) * PAGE_BYTES, num_fds, int(fields[17]), cpu_s)


def children(pid: int) -> dict[int, str]:
    """Pids and names of the processes that `pid` has started and that are there."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(tail.split()[1]) == pid and tail.split()[0] != "Z":
            found[int(path.parent.name)] = head.partition("(")[2]
    return found


class ServerProcess:
    """`quire serve`, with its log in a file. It is ended with the block that it is used in."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "quire", "serve", *arguments, "--port", str(self.port)]
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> ServerProcess:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )
        try:
            await self.until_ready(READY_S)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def until_ready(self, patience_s: float) -> float:
        """Wait until it takes requests; the seconds that took. Raises Unusable."""
        begin_s = time.monotonic()
        for _ in range(int(patience_s / POLL_S)):  # the clock would count while the machine stood still
            if self._process is None or self.status is not None:
                raise Unusable(f"the server ended; the last of its log:\n{self.last_of_log()}")
            if await self.is_ready():
                return time.monotonic() - begin_s
            await asyncio.sleep(POLL_S)
        raise Unusable(f"not ready after {patience_s:g} s; the last of its log:\n{self.last_of_log()}")

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def status(self) -> int | None:
        """With which it ended; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def engine_pid(self) -> int | None:
        """None while there is no engine."""
        return next((pid for pid, name in children(self.pid).items() if name == ENGINE), None)

    async def is_ready(self) -> bool:
        """Return True if the server reports that it is ready."""
        client = Client(self.url, timeout_s=5.0)
        try:
            return (await client.get("/health/ready")).status == 200
        except (OSError, Lost, BadReply):
            return False
        finally:
            client.close()

    def usage(self) -> dict[str, Usage]:
        """Of the server and the engine, as far as they are there."""
        pids = {"server": self.pid, "engine": self.engine_pid}
        found = {name: usage(pid) for name, pid in pids.items() if pid}
        return {name: one for name, one in found.items() if one is not None}

    def kill_engine(self) -> bool:
        """The way a fault of memory would; False if there is none."""
        pid = self.engine_pid
        if pid:
            os.kill(pid, signal.SIGKILL)
        return bool(pid)

    async def stop(self) -> int | None:
        """SIGTERM, and its exit status; killed if that takes too long."""
        if self._process is None:
            return None
        if self.status is None:
            self._process.terminate()
        for _ in range(int(END_S / POLL_S)):
            if self.status is not None:
                return self.status
            await asyncio.sleep(POLL_S)
        self._process.kill()
        return self._process.wait()

    def last_of_log(self, num_lines: int = 12) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-num_lines:])


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program that has started processes: SIGTERM and Ctrl-C end these, too."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        sys.exit("interrupted")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
