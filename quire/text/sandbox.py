"""Renders chat templates in another process, bounded in time and memory.

A template is a program from a model repository: an endless loop or a string that doubles must not cost
more than the one request that met it. A thread cannot be stopped; a process can.
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
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import RequestError

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 256 << 20
MAX_REPLY_BYTES = 128 << 20
BOOT_LIMIT_S = 30.0

# Started with `python -I -S`: no environment, no site. The search path is the parent's, and `quire` is an
# empty package there, so that the process holds Jinja and two files and starts in a tenth of a second.
_BOOT = """
import json, sys, types
sys.path[:] = json.loads(sys.argv.pop(1))
folder = sys.argv.pop(1)
for name, path in (("quire", folder), ("quire.text", folder + "/text")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from quire.text.render_worker import main
main()
"""


class Segment(NamedTuple):
    """A stretch of a rendered prompt; `trusted` if the template wrote it, and not a caller."""

    text: str
    trusted: bool


class Sandbox:
    """One render process, started ahead with `start()` or by the first request, replaced when it dies."""

    def __init__(
        self, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    ) -> None:
        self.time_limit_s = time_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it, so that it warms up while other things load."""
        with self._lock:
            self._alive()

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        with self._lock:
            self._kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(
        self,
        source: str,
        context: Mapping[str, Any],
        trusted: Mapping[str, str | list[str]] | None = None,
        now: datetime | None = None,
    ) -> list[Segment]:
        """Render `source` with the variables of `context` and, as the template's own, of `trusted`.

        `now` is the clock of `strftime_now`. Raises RequestError when the template fails, asks for what
        is not allowed, or exceeds its time or memory.
        """
        clock = now.isoformat() if now else None
        request = {"source": source, "context": context, "trusted": dict(trusted or {}), "now": clock}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            message = f"the conversation cannot be written as JSON: {error}"
            raise RequestError(message, param="messages") from None
        with self._lock:
            reply = self._ask(line)
        if "segments" not in reply:
            raise _refusal(reply, self)
        return [Segment(text, trust) for text, trust in reply["segments"]]

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
            code = process.wait() if process.poll() is not None else None
            reply = {"kind": "time" if code == -signal.SIGXCPU else "memory" if self._ready else "start"}
        except BaseException:
            self._kill()  # interrupted between question and answer: the next answer would be the wrong one
            raise
        if reply.get("kind") not in (None, "template"):
            self._kill()
        return reply

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        package = str(Path(__file__).resolve().parent.parent)
        paths = json.dumps([path for path in sys.path if path])
        limits = (str(self.memory_limit_bytes), str(max(1, round(self.time_limit_s))))
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _BOOT, paths, package, *limits),
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
    """Write `line`, read one line. TimeoutError past the deadline, EOFError when the process ends."""
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


def _refusal(reply: Mapping[str, Any], sandbox: Sandbox) -> RequestError:
    kind = reply.get("kind")
    if kind == "template":
        message = f"the chat template refused the conversation: {reply['error']}"
        return RequestError(message, "check the roles, the tools and chat_template_kwargs", "messages")
    if kind == "time":
        message = f"the chat template did not finish in {sandbox.time_limit_s:g} s"
    elif kind == "memory":
        message = f"the chat template needed more than {sandbox.memory_limit_bytes >> 20} MiB"
    else:
        return RequestError("the render process did not start", "is jinja2 installed for this Python?")
    return RequestError(message, "shorten the conversation, or use another chat template", "messages")
