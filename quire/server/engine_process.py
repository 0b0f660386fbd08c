"""The engine's process: reads requests from a socket, steps the engine, writes what came of each step.

Started by the server as `python -m quire.server.engine_process FD`, where FD is its end of a socket pair.
It leaves signals to the server and ends with the socket, so it never outlives the server.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable

from quire.build import Announce, Built, Progress, build
from quire.config import EngineConfig
from quire.engine.engine import Engine, step
from quire.errors import ConfigError, QuireError, RequestError
from quire.server import engine_messages as messages
from quire.server import malloc_arenas
from quire.server.engine_messages import BadFrame, EngineMessage, ToEngine

NAME = b"quire-engine"
PROGRESS_S = 0.05  # between two messages about loading
YOUNG_OBJECTS = 50_000  # before the collector looks at them; 700 would be a pause every few steps
_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_LOG = logging.getLogger(__name__)

Build = Callable[[EngineConfig, Progress, Announce], Built]


class ServerSocket:
    """The engine's end of the socket. EOFError and OSError mean that the server is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = messages.engine_reader()

    def send(self, message: EngineMessage) -> None:
        self.send_frame(messages.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        """Waits while the socket is full: the server always reads, and nothing it does waits for this."""
        self._socket.sendall(frame)

    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages that have come; with `wait`, something has."""
        received: list[ToEngine] = []
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                data = self._socket.recv(_CHUNK_BYTES, flags)
            except BlockingIOError:
                return received
            if not data:
                raise EOFError
            received += self._reader.feed(data)
            flags = socket.MSG_DONTWAIT


def serve(server: ServerSocket, build: Build) -> None:
    """Load what the first message says, then run requests until the socket closes."""
    waiting: list[ToEngine] = []
    while not waiting:
        waiting = server.receive(wait=True)
    first = waiting.pop(0)
    if not isinstance(first, messages.Start):
        raise BadFrame(f"{type(first).__name__} before Start")
    engine = _load(server, first.config, build)
    trim_s = time.monotonic() + malloc_arenas.PERIOD_S
    while True:
        for message in waiting:
            _take(server, engine, message)
        if engine.has_work:
            outputs, report = step(engine)
            if report is not None:
                for frame in messages.encode_step(outputs, report):
                    server.send_frame(frame)
        if time.monotonic() >= trim_s:
            malloc_arenas.trim()
            trim_s = time.monotonic() + malloc_arenas.PERIOD_S
        waiting = server.receive(wait=not engine.has_work)


def _load(server: ServerSocket, config: EngineConfig, build: Build) -> Engine:
    told_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told_s
        if (now := time.monotonic()) - told_s >= PROGRESS_S or done == total:
            told_s = now
            server.send(messages.Loading(done, total))

    built = build(config, progress, lambda line, nbytes: server.send(messages.Announced(line, nbytes)))
    _spare_collections()
    server.send(messages.Ready(built.facts))
    built.runner.prepare_grammars()  # streams would wait, if the first request that has one did it
    return built.engine


def _spare_collections() -> None:
    """Steps make no cycles, and what is loaded stays: pauses of the collector would find nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _take(server: ServerSocket, engine: Engine, message: ToEngine) -> None:
    match message:
        case messages.Submit(request):
            try:
                engine.add(message.checked())
            except RequestError as error:
                server.send(messages.RequestRefused.of(request.request_id, error))
        case messages.Abort(request_id, sequence):
            engine.abort(request_id, sequence)
        case _:
            raise BadFrame("a second Start")


def _become_engine() -> None:
    """Take a name, leave signals to the server, and end with it even in the middle of a long step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(build: Build = build) -> int:
    """Run until the server closes the socket whose number is the last argument: 0, or 1 after a failure."""
    _become_engine()
    with socket.socket(fileno=int(sys.argv[-1])) as connection:
        connection.set_inheritable(False)
        server = ServerSocket(connection)
        try:
            serve(server, build)
        except (EOFError, ConnectionError):
            return 0
        except Exception as error:
            failed = _failure(error)
        try:
            server.send(failed)
        except OSError:
            _LOG.warning("the server is gone")
    return 1


def _failure(error: Exception) -> messages.Failed:
    """What to tell the server of an error, after telling the log of those that nobody expects."""
    if isinstance(error, ConfigError):
        return messages.Failed(error.message, error.hint, config=True)
    if isinstance(error, BadFrame):
        _LOG.critical("the engine ends: the server sent %s", error)
        return messages.Failed(f"the server sent {error}")
    _LOG.critical("the engine ends", exc_info=error)
    message = error.message if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    return messages.Failed(message)


if __name__ == "__main__":
    sys.exit(main())
