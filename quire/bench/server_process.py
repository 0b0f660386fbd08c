"""`quire serve` as a child process, for tests of load on a model that nobody serves yet."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.errors import QuireError, shortened

_URL = re.compile(r"(https?://[^\s/]+)/v1")
_ERROR = re.compile(r"^error: (.*)$(?:\nhint: (.*)$)?", re.MULTILINE)
_POLL_S = 0.1
_END_S = 60.0  # for the server to end open requests
_MAX_LOG = 600  # characters of it in an error message


@contextlib.contextmanager
def served(flags: Sequence[str], recorded: bool = False) -> Iterator[str]:
    """Start `quire serve` with these flags at a free port, yield its URL, and end it.

    With `recorded`, it records its engine, so that it can give a trace. Raises QuireError with the end of the
    server's log if it does not start.
    """
    command = [sys.executable, "-m", "quire", "serve", *flags, "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        if recorded and "--record" not in flags:
            command += ["--record", str(Path(folder) / "recording")]
        path = Path(folder) / "log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield _url(process, path)
        finally:
            _end(process)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server says where it is. It may take long to download and load a model."""
    while True:
        ended = process.poll() is not None
        text = log.read_text("utf-8", "replace")
        if found := _URL.search(text):
            return found[1]
        if ended:
            raise _failure(text)
        time.sleep(_POLL_S)


def _failure(text: str) -> QuireError:
    """Return the error that a log ends with, and its hint."""
    found = _ERROR.search(text)
    if found:
        return QuireError(f"the server did not start: {found[1]}", found[2])
    return QuireError(f"the server did not start: {shortened(text[-_MAX_LOG:], _MAX_LOG)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
