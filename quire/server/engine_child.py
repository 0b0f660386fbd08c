"""The engine's process as its parent holds it: started, spoken to, ended and cleaned up after."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

from quire.server import engine_messages as messages
from quire.server.engine_messages import BadFrame, EngineMessage, FromEngine

# -P: the current directory is no place to take modules from. faulthandler: a crash says where it was.
COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "quire.server.engine_process")
POLL_S = 0.005


class EngineChild(asyncio.Protocol):
    """One process and the socket to it. `ended` is done as soon as the socket is closed by either side.

    `receive` is called with each message. `bad_frame` says what came that was none, and closed the socket.
    """

    process: subprocess.Popen[bytes]
    _transport: asyncio.Transport

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bad_frame: str | None = None
        self._receive = receive
        self._reader = messages.server_reader()

    @classmethod
    async def spawn(cls, command: Sequence[str], receive: Callable[[FromEngine], None]) -> EngineChild:
        """Start a fresh interpreter. Raises OSError when there is no room for one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        child = cls(receive)
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
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

    async def end(self, patience_s: float) -> int:
        """Close the socket, which ends the process; kill it after `patience_s`. Returns its exit status."""
        self._transport.abort()
        deadline_s = time.monotonic() + patience_s
        while (status := self.process.poll()) is None:
            if time.monotonic() >= deadline_s:
                self.process.kill()
            await asyncio.sleep(POLL_S)
        return status

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop, with whatever has come."""
        try:
            received = self._reader.feed(data)
        except BadFrame as error:
            self.bad_frame, received = str(error), []
            self._transport.abort()
        for message in received:
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


def reason(status: int) -> str:
    """Why a process ended, in words."""
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was ended by signal {-status} ({signal.strsignal(-status)})"
