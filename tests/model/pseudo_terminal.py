"""A program in a pseudo-terminal, driven as a person would drive it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path


class Terminal:
    """A program in a pseudo-terminal that controls it, so that \\x03 is Ctrl-C.

    Keywords are variables of its environment.
    """

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, cwd: Path | None = None, **environment: str
    ) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(slave)
        self.seen = ""

    def read_until(self, words: str, seconds: float = 60) -> str:
        """Return what was shown since the last call, up to these words."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{words!r} did not come; shown: {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        shown, self.seen = self.seen.split(words, 1)
        return shown

    def rest(self) -> str:
        """Return all that was shown since, once the program has ended."""
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self.master, 4096):
                self.seen += data.decode(errors="replace")
        os.close(self.master)
        return self.seen

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def press_until_it_ends(self, key: str, seconds: float = 60) -> int:
        """Press a key again and again: readline hears no Ctrl-C between its prompt and its wait for input.

        Slowly enough that no press comes while a program that was stopped twice is ending.
        """
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.7)
        return self.process.wait(0)

    def close(self) -> int:
        self.type("\x04")
        status = self.process.wait(30)
        os.close(self.master)
        return status
