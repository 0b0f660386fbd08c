"""Child side of a sandbox: limits this process, then runs a job for each request until stdin ends.

Requests and replies are JSON, a line each, on stdin and stdout. Every import costs start-up time.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_ERROR_CHARACTERS = 500


class Job(NamedTuple):
    """Work on untrusted input: a function from a request to a reply."""

    run: Callable[[Any], Mapping[str, Any]]
    describe: Callable[[Exception], str]  # words for what `run` raised: the "error" of the reply
    warm_up: Any  # a request that loads all modules and codecs of `run`, as no file can be opened later
    stack_bytes: int = 0  # of the thread that runs it; 0 for the main thread and its own


def main(job: Job) -> None:
    """Serve requests until stdin ends. Arguments: memory limit in bytes, processor seconds a request."""
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _reply(job, json.dumps(job.warm_up).encode())
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no file, no socket: 0, 1 and 2 are taken
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not job.stack_bytes:
        _serve(job, cpu_s)
        return
    threading.stack_size(job.stack_bytes)
    server = threading.Thread(target=_serve, args=(job, cpu_s))
    server.start()
    server.join()


def _serve(job: Job, cpu_s: int) -> None:
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    _write(b'{"ready": true}')
    for line in sys.stdin.buffer:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + cpu_s + 1, hard_limit))
        _write(_reply(job, line))


def _reply(job: Job, line: bytes) -> bytes:
    """Run the job for one request; turn every failure into a reply."""
    try:
        return json.dumps(job.run(json.loads(line))).encode()
    except MemoryError:
        return b'{"kind": "memory"}'  # the parent then replaces this process
    except Exception as error:
        return json.dumps({"error": job.describe(error)[:MAX_ERROR_CHARACTERS]}).encode()


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
