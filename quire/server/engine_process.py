"""The engine's process: read requests from a socket, step the engine, write the outputs of each step.

The server starts it as `python -m quire.server.engine_process FD`, where FD is its end of a socket pair. It
ignores signals meant for the server and exits when the socket closes, so it never outlives the server.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

from quire.build import Built, build
from quire.engine.engine import Engine, step
from quire.errors import ConfigError, QuireError, RequestError
from quire.recording.chunks import ChunkKind
from quire.recording.identity import header_of, link_fingerprint
from quire.recording.journal import Journal, JournaledScheduler
from quire.server import engine_messages as messages
from quire.server import malloc_arenas
from quire.server.engine_adapters import AdapterTraffic
from quire.server.engine_blocks import BlockTraffic
from quire.server.engine_messages import BadFrame, EngineMessage, ToEngine
from quire.types import Admission

NAME = b"quire-engine"
PROGRESS_S = 0.05  # between two Loading messages
# New objects before a garbage collection of 0.5 ms; the default of 700 would pause every few steps.
GC_THRESHOLD = 10_000
_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_LOG = logging.getLogger(__name__)

Build = Callable[..., Built]  # with the arguments of quire.build.build


class ServerSocket:
    """The engine's end of the socket. EOFError and OSError mean that the server has closed its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = messages.engine_reader()
        self._sending = threading.Lock()

    def send(self, message: EngineMessage) -> None:
        self.send_frame(messages.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        """Send a frame, from any thread; wait while the socket is full.

        The server always reads, so this cannot deadlock.
        """
        with self._sending:
            self._socket.sendall(frame)

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        """Return the messages received so far, after waiting at most so long for data; None: for any time."""
        received: list[ToEngine] = []
        if wait_s:
            select.select((self._socket,), (), (), wait_s)
        flags = 0 if wait_s is None else socket.MSG_DONTWAIT
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
    """Load the model that the first message names, then run requests until the socket closes."""
    waiting: list[ToEngine] = []
    while not waiting:
        waiting = server.receive(None)
    first = waiting.pop(0)
    if not isinstance(first, messages.Start):
        raise BadFrame(f"{type(first).__name__} before Start")
    built = _load(server, first, build)
    engine = built.engine
    engine.on_admitted = partial(_tell_admitted, server)
    traffic = BlockTraffic(engine.exchange, partial(_fingerprint, built), server.send)
    adapters = AdapterTraffic(built.adapters, server.send)
    with closing(engine):
        _run(server, engine, traffic, adapters, waiting)


def _fingerprint(built: Built) -> bytes:
    return link_fingerprint(built.description, built.backend.block_layout())


def _run(
    server: ServerSocket,
    engine: Engine,
    traffic: BlockTraffic,
    adapters: AdapterTraffic,
    waiting: list[ToEngine],
) -> None:
    """Run requests, beginning with the messages that wait, until the socket closes."""
    trim_s = time.monotonic() + malloc_arenas.PERIOD_S
    while True:
        for message in waiting:
            if isinstance(message, messages.ChangeAdapter):
                adapters.change(message)
            else:
                _handle(server, engine, traffic, message)
        if traffic.busy:
            traffic.send_some()
        if engine.wait_s == 0.0:
            outputs, report = step(engine)
            if report is not None:
                for frame in messages.encode_step(outputs, report):
                    server.send_frame(frame)
        if time.monotonic() >= trim_s:
            malloc_arenas.trim()
            trim_s = time.monotonic() + malloc_arenas.PERIOD_S
        waiting = server.receive(0.0 if traffic.busy else engine.wait_s)


def _tell_admitted(server: ServerSocket, admitted: tuple[Admission, ...]) -> None:
    """Tell the server within a step, which does not fail if the server has closed: its outputs find that."""
    with suppress(ConnectionError):
        server.send(messages.RequestsAdmitted(sorted({one.request_id for one in admitted})))


def _load(server: ServerSocket, start: messages.Start, build: Build) -> Built:
    last_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        if (now := time.monotonic()) - last_s >= PROGRESS_S or done == total:
            last_s = now
            server.send(messages.Loading(done, total))

    def announce(line: str, nbytes: int) -> None:
        server.send(messages.Announced(line, nbytes))

    measuring = (lambda: server.send(messages.Measuring())) if start.measure else None
    more: dict[str, Any] = {"available_bytes": start.available_bytes, "num_sharing": start.num_sharing}
    if start.adapters is not None:
        more["adapters"] = start.adapters
    built = _build(server, start, partial(build, start.config, progress, announce, measuring, **more))
    _make_collections_rare()
    server.send(messages.Ready(built.facts))
    built.runner.prepare_grammars()  # later, streams would wait while the first grammar did it
    return built


def _build(server: ServerSocket, start: messages.Start, build: Callable[..., Built]) -> Built:
    """Build the engine; if it is to be recorded, with a journal that goes to the server."""
    if start.journal is None:
        return build()

    def send(chunk: bytes, kind: ChunkKind) -> None:
        server.send(messages.Journaled(chunk, kind))

    journal = Journal(start.journal, send, secrets.token_bytes(32))
    built = build(partial(JournaledScheduler, journal))
    scheduler = built.engine.scheduler
    if isinstance(scheduler, JournaledScheduler):
        scheduler.begin_journal(header_of(built.description, scheduler))
    return built


def _make_collections_rare() -> None:
    """Make garbage collection rare: loaded objects stay, and steps create no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _handle(server: ServerSocket, engine: Engine, traffic: BlockTraffic, message: ToEngine) -> None:
    match message:
        case messages.Submit(request):
            try:
                engine.add(message.checked(), traffic.take(request.request_id))
                server.send(messages.RequestAccepted(request.request_id))
            except RequestError as error:
                server.send(messages.RequestRefused.of(request.request_id, error))
        case messages.Abort(request_id, sequence):
            engine.abort(request_id, sequence)
        case messages.Bring():
            traffic.bring(message)
        case messages.ReadBlocks():
            traffic.read(message)
        case messages.WatchSteps(on):
            engine.watch(on)
        case messages.FollowCache(on):
            engine.follow_cache(on)
        case _:
            raise BadFrame("a second Start")


def _become_engine() -> None:
    """Set the process's name, ignore signals meant for the server, and die with it, even within a step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(build: Build = build) -> int:
    """Serve the socket whose number is the last argument until it closes. Return 0, or 1 after a failure."""
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
            _LOG.warning("the server has closed the connection")
    return 1


def _failure(error: Exception) -> messages.Failed:
    """Return the message that reports an error to the server; log an unexpected one."""
    if isinstance(error, ConfigError):
        return messages.Failed(error.message, error.hint, config=True)
    if isinstance(error, BadFrame):
        _LOG.critical("the engine exits: the server sent %s", error)
        return messages.Failed(f"the server sent {error}")
    _LOG.critical("the engine exits", exc_info=error)
    message = error.message if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    return messages.Failed(message)


if __name__ == "__main__":
    sys.exit(main())
