"""The recorder of a server: a ring in memory, and the incident files written from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quire.environment import user_path
from quire.errors import ConfigError, Overloaded, QuireError, RequestError
from quire.recording.chunks import ChunkKind, JournalLimits
from quire.recording.incident import Incident, write_incident
from quire.recording.ring import Ring

MAX_FILES = 20  # incident files in the folder: then no more are written until some are removed
PAUSE_S = 60.0  # between two files written by themselves: one fault may fail many requests
MAX_TRACE_S = 120.0  # for making a trace
TRACE_RETRY_S = 5
LOWER_PRIORITY = 10  # than the server's, as `nice` has it
LOWEST_PRIORITY = 19
SUFFIX = ".quire-incident"
_LOG = logging.getLogger(__name__)
_NAMING = threading.Lock()  # held until a file has its name: recorders of several models share a folder


@dataclass(frozen=True, slots=True)
class WrittenIncident:
    """An incident file that was written."""

    path: Path
    num_bytes: int


class Recorder:
    """Keeps the journal of the engine's process in a ring, and writes it to a file when something happens.

    Nothing is on disk otherwise. Files are in a folder that only its owner may enter. Raises ConfigError if
    the folder cannot be used.
    """

    def __init__(
        self,
        folder: str,
        *,
        contents: bool = False,
        max_bytes: int = 64 << 20,
        max_age_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = _private_folder(folder)
        self._ring = Ring(max_bytes, max_age_s)
        self._contents = contents
        self._clock = clock
        self._last_s: float | None = None  # when a file was last written by itself
        self._writing: set[asyncio.Task[None]] = set()
        self._tracing = asyncio.Lock()

    @property
    def limits(self) -> JournalLimits:
        """The limits of the engine's journal."""
        return self._ring.limits(self._contents)

    def take(self, chunk: bytes, kind: ChunkKind) -> None:
        """Keep a chunk of the engine's journal."""
        self._ring.take(chunk, kind, self._clock())

    def report(self, reason: str) -> None:
        """Write a file by itself, without waiting for it; at most one in PAUSE_S."""
        now = self._clock()
        if self._last_s is not None and now - self._last_s < PAUSE_S:
            return
        header, chunks = self._ring.header, self._ring.chunks(now)
        if header is None or not chunks:
            return
        self._last_s = now
        task = asyncio.get_running_loop().create_task(self._report(reason, header, chunks))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _report(self, reason: str, header: bytes, chunks: list[bytes]) -> None:
        try:
            written = await asyncio.to_thread(self._write, reason, header, chunks)
        except (OSError, RequestError) as error:
            _LOG.warning("no incident file was written: %s", error)
        else:
            _LOG.warning("the incident was recorded in %s (%s)", written.path, reason)

    async def write(self, reason: str) -> WrittenIncident:
        """Write a file now, and wait for it. Raises RequestError if there is nothing to write, or no room."""
        header, chunks = self._ring.header, self._ring.chunks(self._clock())
        if header is None or not chunks:
            raise RequestError("nothing was recorded yet", "send a request first")
        try:
            return await asyncio.to_thread(self._write, reason, header, chunks)
        except OSError as error:
            raise RequestError(f"the incident file cannot be written: {error.strerror}") from error

    async def trace(self, last_s: float) -> bytes:
        """Return a trace of the last seconds, for Perfetto.

        A process of low priority makes it: plans are computed anew, and streams must not wait for that.
        Raises RequestError if nothing was recorded, Overloaded while another trace is made, and QuireError if
        none can be made.
        """
        if self._tracing.locked():
            raise Overloaded("another trace is being made", "ask again when it is done", TRACE_RETRY_S)
        header, chunks = self._ring.header, self._ring.chunks(self._clock(), last_s)
        if header is None or not chunks:
            raise RequestError("nothing was recorded yet", "send a request first")
        async with self._tracing:
            try:
                with tempfile.TemporaryDirectory(dir=self.folder, prefix="trace-") as folder:
                    recording, trace = Path(folder) / "recording", Path(folder) / "trace"
                    incident = Incident("trace", time.time())
                    await asyncio.to_thread(write_incident, recording, incident, header, chunks)
                    await _make_trace(recording, trace, last_s)
                    return await asyncio.to_thread(trace.read_bytes)
            except OSError as error:
                raise QuireError(f"no trace was made: {error.strerror}") from error

    async def close(self) -> None:
        """Wait for the files being written."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _write(self, reason: str, header: bytes, chunks: list[bytes]) -> WrittenIncident:
        with _NAMING:
            names = {path.name for path in self.folder.glob(f"*{SUFFIX}")}
            if len(names) >= MAX_FILES:
                raise RequestError(
                    f"{self.folder} has {len(names)} incident files already",
                    "remove those that were looked at",
                )
            written_s = time.time()
            stem = datetime.fromtimestamp(written_s, UTC).strftime("%Y%m%dT%H%M%S")
            number = next(n for n in range(len(names) + 1) if f"{stem}-{n}{SUFFIX}" not in names)
            path = self.folder / f"{stem}-{number}{SUFFIX}"
            size = write_incident(path, Incident(reason, written_s), header, chunks)
        return WrittenIncident(path, size)


def _private_folder(name: str) -> Path:
    """Return a folder that only this user may enter, made if missing. Raises ConfigError."""
    folder = user_path(name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"record: {name!r} cannot be used as a folder: {error.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.getuid():
        hint = "recordings are private: give a new folder, or `chmod 700` this one"
        raise ConfigError(f"record: others may enter {name!r}", hint)
    if not usable:
        raise ConfigError(f"record: no files can be written in {name!r}")
    return folder


async def _make_trace(recording: Path, trace: Path, last_s: float) -> None:
    """Write a trace of a recording, in a process of its own. Raises QuireError, or OSError."""
    command = (sys.executable, "-P", "-m", "quire", "replay", str(recording))
    flags = ("--trace", str(trace), "--last", f"{last_s:f}s", "--json")
    process = await asyncio.create_subprocess_exec(*command, *flags, stderr=asyncio.subprocess.PIPE)
    try:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, min(own + LOWER_PRIORITY, LOWEST_PRIORITY))
        async with asyncio.timeout(MAX_TRACE_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise QuireError(f"no trace was made in {MAX_TRACE_S:g} s", "ask for a shorter time") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        text = said.decode(errors="replace")
        _LOG.warning("no trace was made: %s", text[-2000:])
        errors = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
        reason = errors[-1] if errors else f"its process ended with status {process.returncode}"
        raise QuireError(f"no trace was made: {reason}", "the server's log has the details")
