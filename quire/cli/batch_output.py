"""The output of a batch: a file of complete lines that a later run can resume."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.cli.batch_input import digest
from quire.errors import ConfigError, quoted

BEGIN = b'{"id":"batch_req_'  # of every line
OVERWRITE = "give another file, or --overwrite to replace this one"


class OutputResponse(msgspec.Struct):
    """The HTTP response to one request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """One line of the output, as OpenAI's batch API writes it. `error` is None for an answered request."""

    id: str
    custom_id: str | None
    response: OutputResponse | None
    error: dict[str, Any] | None

    @property
    def is_answer(self) -> bool:
        return self.error is None and self.response is not None and self.response.status_code == 200


_LINE = msgspec.json.Decoder(OutputLine)


class StreamOutput:
    """Lines written to a pipe or a device, which cannot be resumed."""

    resumes = False
    done: Set[bytes] = frozenset()
    num_errors = 0

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file

    def begin(self) -> None:
        """Prepare for writing; a stream needs no preparation."""

    def write(self, line: OutputLine) -> None:
        """Write and flush one line. Raises OSError with the name of the file."""
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            error.filename = error.filename or self.name
            raise

    def close(self) -> None:
        """Close the output. Every line was flushed, so an error here was raised before."""
        with suppress(OSError):
            self._file.close()


class FileOutput(StreamOutput):
    """Lines appended to a file. Existing answers are kept, errors are removed so that they are retried.

    The file is not changed before `begin`, which is called once the model is loaded. A lock keeps a second
    process from writing to it.
    """

    resumes = True

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Find the requests that the file answers. Raises ConfigError if it is not the output of a batch."""
        super().__init__(_locked(path.open("ab+"), path), str(path))
        self._path = path.resolve()  # keeps symbolic links
        self._overwrite = overwrite
        self._kept_bytes = 0
        self.done = self._done = set[bytes]()
        try:
            if not overwrite:
                self._scan()
        except BaseException:
            self.close()
            raise

    def _scan(self) -> None:
        for line, raw in self._read():
            if line.is_answer and line.custom_id is not None:
                self._done.add(digest(line.custom_id))
                self._kept_bytes += len(raw)
            else:
                self.num_errors += 1

    def _read(self) -> Iterator[tuple[OutputLine, bytes]]:
        """Yield the lines with their bytes, except for a last one cut short by a kill or a full disk."""
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            try:
                yield _LINE.decode(raw), raw
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                begun = raw[: len(BEGIN)] == BEGIN[: len(raw)]
                if raw.endswith(b"\n") or not begun:
                    problem = f"{self.name}: line {number} is not a line of a batch's output"
                    raise ConfigError(problem, OVERWRITE) from None
                return

    def begin(self) -> None:
        """Remove all but the answers, or everything with `overwrite`."""
        size = self._file.seek(0, os.SEEK_END)
        if self._overwrite:
            self._file.truncate(0)
        elif self._kept_bytes < size:
            self._rewrite()
        elif size and not self._ends_a_line():
            self._file.write(b"\n")

    def _ends_a_line(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"

    def _rewrite(self) -> None:
        """Replace the file atomically by one with its answers only."""
        path = self._path.with_name(f".{self._path.name}.quire-rewrite")
        new = path.open("wb")
        try:
            shutil.copymode(self._path, path)
            for line, raw in self._read():
                if line.is_answer:
                    new.write(raw.removesuffix(b"\n") + b"\n")
            new.flush()
            os.fsync(new.fileno())
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.replace(self._path)
        except BaseException:
            new.close()
            path.unlink()
            raise
        self._file.close()
        self._file = new


def open_output(name: str, overwrite: bool, input_name: str) -> StreamOutput:
    """Open the output; "-" is standard output. Raises ConfigError for a file that must not be written."""
    if name == "-":
        return StreamOutput(open(1, "wb", closefd=False), "standard output")
    path = Path(name)
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise ConfigError(f"{name}: is a folder", "give the name of a file")
        return StreamOutput(path.open("wb"), name)
    if input_name != "-" and path.exists() and path.samefile(input_name):
        raise ConfigError(f"{name} is also the input", "give another file to -o")
    return FileOutput(path, overwrite)


def _locked(file: BinaryIO, path: Path) -> BinaryIO:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            problem = f"{quoted(str(path))} is being written by another quire batch"
            raise ConfigError(problem, "wait for it to finish, or give another file") from None
        raise
    return file
