"""The engine's process seen from its parent: start it, exchange messages with it, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from quire.errors import ConfigError, EngineDead, QuireError
from quire.server import engine_messages as messages
from quire.server.engine_messages import BadFrame, EngineMessage, FromEngine

# -P: import no modules from the current directory. faulthandler: a crash prints its traceback.
COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "quire.server.engine_process")
POLL_S = 0.005
EXIT_S = 0.3  # a process whose socket is closed has this long to exit before it is killed


class EngineChild(asyncio.Protocol):
    """One engine process and its socket. `ended` is done once either side has closed the socket.

    `receive` is called with each message. `failed` is the process's own account of its end, if it sent one.
    """

    process: subprocess.Popen[bytes]
    _transport: asyncio.Transport

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bad_frame: str | None = None  # the reason the socket was closed, if it was what the process sent
        self.failed: messages.Failed | None = None
        self._receive = receive
        self._reader = messages.server_reader()

    @classmethod
    async def spawn(
        cls, command: Sequence[str], receive: Callable[[FromEngine], None], processors: Sequence[int] = ()
    ) -> EngineChild:
        """Start a new interpreter, on these processors if there are any. Raises OSError if that fails."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        child = cls(receive)
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
            with _on(processors):
                child.process = subprocess.Popen(
                    (*command, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
                )
        return child

    def send(self, message: EngineMessage) -> None:
        """Send without waiting. Raises BadFrame when the message is too long."""
        frame = messages.encode(message)
        if not self._transport.is_closing():
            self._transport.write(frame)

    async def end(self, timeout_s: float) -> int:
        """Close the socket, which ends the process; kill it after `timeout_s`. Return its exit status."""
        self._transport.abort()
        deadline_s = time.monotonic() + timeout_s
        while (status := self.process.poll()) is None:
            if time.monotonic() >= deadline_s:
                self.process.kill()
            await asyncio.sleep(POLL_S)
        return status

    async def cause_of_death(self) -> QuireError:
        """End the process and return an error with the reason it ended."""
        status = await self.end(EXIT_S)
        if self.bad_frame is not None:
            return EngineDead(f"the engine sent {self.bad_frame}")
        if self.failed is None:
            return EngineDead(f"the engine died: {describe_exit(status)}")
        error = ConfigError if self.failed.config else EngineDead
        return error(self.failed.message, self.failed.hint)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode what the event loop has read."""
        try:
            for message in self._reader.feed(data):
                if isinstance(message, messages.Failed):
                    self.failed = message
                self._receive(message)
        except BadFrame as error:
            self.bad_frame = str(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


@contextlib.contextmanager
def _on(processors: Sequence[int]) -> Iterator[None]:
    """Let processes that this thread starts meanwhile run on these processors only, all their threads.

    A new process inherits the mask of the thread that starts it, before any library in it starts threads.
    """
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe_exit(status: int) -> str:
    """Describe an exit status as subprocess reports it."""
    if status >= 0:
        return f"it exited with status {status}"
    return f"it was killed by signal {-status} ({signal.strsignal(-status)})"
