"""Parent side of a sandbox: a child process that runs one job, bounded in time and memory.

A chat template or a grammar is a program that somebody else wrote: an endless loop, a string that doubles or
a stack that overflows must not cost more than the one request that met it. A thread cannot be stopped; a
process can.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

MAX_REPLY_BYTES = 128 << 20
BOOT_LIMIT_S = 30.0
FAILURES = frozenset({"time", "memory", "stack", "start"})  # kinds of replies after which the process ends

# Run by `python -I -S`: no environment variables, no hooks of site-packages. The search path is the parent's,
# and `quire` is an empty package there: its own __init__ imports more than a job needs.
_BOOT = """
import json, sys, types
sys.path[:] = json.loads(sys.argv.pop(1))
sys.modules["quire"] = types.ModuleType("quire")
sys.modules["quire"].__path__ = [sys.argv.pop(1)]
from quire.sandbox.job import main
from {module} import JOB
main(JOB)
"""


class SandboxProcess:
    """A child process that answers requests with the `JOB` of a module (see `quire.sandbox.job`).

    It starts with `start()` or the first request, and is replaced when it dies. Any number of threads may
    share it: they take turns. `cpu_limit_s` bounds the processor time of one request, and defaults to
    `time_limit_s`, which bounds its wall-clock time.
    """

    def __init__(
        self, module: str, *, time_limit_s: float, memory_limit_bytes: int, cpu_limit_s: int | None = None
    ) -> None:
        self.time_limit_s = time_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self.cpu_limit_s = cpu_limit_s
        self._boot = _BOOT.format(module=module)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it, so that it warms up while other things load."""
        with self._lock:
            self._alive()

    def close(self) -> None:
        """End the process. A later request starts another."""
        with self._lock:
            self._kill()

    def ask(self, line: bytes) -> dict[str, Any]:
        """Send a request, a line of JSON; return the job's reply, or {"kind": one of FAILURES}."""
        with self._lock:
            return self._ask(line)

    def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._alive()
        try:
            if not self._ready:
                _exchange(process, b"", time.monotonic() + BOOT_LIMIT_S)
                self._ready = True
            answer = _exchange(process, line, time.monotonic() + self.time_limit_s)
            reply: dict[str, Any] = json.loads(answer)
        except TimeoutError:
            reply = {"kind": "time"}
        except (EOFError, ValueError):
            reply = {"kind": self._cause_of_death(process)}
        except BaseException:
            self._kill()  # interrupted before the reply was read: the next request would read it as its own
            raise
        if reply.get("kind") in FAILURES:
            self._kill()
        return reply

    def _cause_of_death(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            code = None
        by_signal = {-signal.SIGXCPU: "time", -signal.SIGSEGV: "stack"}
        return by_signal.get(code or 0, "memory") if self._ready else "start"

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        package = str(Path(__file__).resolve().parent.parent)
        paths = json.dumps([path for path in sys.path if path])
        cpu_limit_s = self.cpu_limit_s or max(1, round(self.time_limit_s))
        limits = (str(self.memory_limit_bytes), str(cpu_limit_s))
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", self._boot, paths, package, *limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
        )
        self._stop = weakref.finalize(self, _end, self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return self._process

    def _kill(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process, self._stop, self._ready = None, None, False


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.kill()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], line: bytes, deadline_s: float) -> bytes:
    """Write `line`, read one line. Raise TimeoutError past the deadline, EOFError when the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    source, sink = process.stdout.fileno(), process.stdin.fileno()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if line:
        poll.register(sink, select.POLLOUT)
    rest, reply = memoryview(line), bytearray()
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        for ready, event in poll.poll(left_s * 1000):
            if ready == source:
                chunk = os.read(source, 1 << 18)
                if not chunk or len(reply) > MAX_REPLY_BYTES:
                    raise EOFError
                reply += chunk
                if chunk.endswith(b"\n"):
                    return bytes(reply)
                continue
            if event & (select.POLLERR | select.POLLHUP):
                raise EOFError
            rest = rest[os.write(sink, rest[: 1 << 16]) :]
            if not rest:
                poll.unregister(sink)
