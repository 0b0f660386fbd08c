"""The packed cache: quantized weights in their memory layout, in files of the user's cache directory.

Quantizing a model takes seconds, reading it back a fraction of one. The key of a file covers the files of the
checkpoint (path, size, modification time and header bytes), the quantization, the layout, and the version of
the packing. It does not include the instruction set: all share one layout.

A file is the packed bytes, then a JSON object about them with a checksum of each chunk, then 32 bytes: the
length of the JSON, its checksum, and a magic number. It is read into huge pages, which decode 5 to 10% faster
than a mapped file and take 0.2 s per gigabyte to fill. Every byte is verified on each read, at the speed of
memory, so files are not synced to disk: damage by a crash is detected, and the file is rebuilt. Files are
created by renaming and never modified, so any number of processes may read and write concurrently. If the
cache cannot be read or written, loading is only slower.

Processes that share their weights map the file instead (`shared`), and one of them writes it for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.environment import cache_folder
from quire.errors import ConfigError
from quire.json_file import parse_object
from quire.regular_file import open_regular

LIMIT_BYTES = 20_000_000_000  # of all files, or a quarter of the disk space available to them, if less
LEAST_BYTES = 16_000_000  # packing less is too fast to be worth a file
CHUNK_BYTES = 1 << 22  # unit of reading and verification

_SUFFIX, _UNFINISHED = ".packed", ".tmp"
_MARK = b"quire packed v1\n"
_TAIL_BYTES, _JSON_LIMIT_BYTES = 32, 8 << 20
_STALE_S = 3600.0  # a file unfinished after an hour is abandoned

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Mapper = Callable[[Callable[[int], int], Iterable[int]], Iterator[int]]  # the built-in map, or a pool's
Progress = Callable[[int, int], None]
Allocate = Callable[[int], Bytes]  # returns zeros, so many bytes

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of the cache. `used` is the time of the last read or write, in seconds since 1970."""

    path: Path
    key: str
    model: str
    quantization: str
    nbytes: int  # of packed weights
    sums: tuple[int, ...]
    used: float


def packed_folder() -> Path:
    """Return the folder of the user's packed weights."""
    return cache_folder() / "packed"


def name_of(model: str) -> str:
    """Return the name of a model in the cache: the full path of a folder; "demo" and hub ids unchanged."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = Path(model).expanduser()
        return str(path.resolve()) if path.exists() else model
    return model


def allocate(nbytes: int) -> Bytes:
    """Return zeros, in huge pages if available: a step reads all of it, with fewer TLB misses."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


class Damaged(Exception):
    """A file whose content does not match its description."""


class PackedCache:
    """The files of one folder, at most `limit_bytes` in total; the least recently used are removed."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int = LIMIT_BYTES,
        least_bytes: int = LEAST_BYTES,
        shared: bool = False,
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.least_bytes = least_bytes
        self.shared = shared

    def holds(self, nbytes: int) -> bool:
        """Return True if so many bytes are worth a file."""
        return nbytes >= self.least_bytes

    def read(
        self,
        key: str,
        nbytes: int,
        mapper: Mapper,
        progress: Progress | None = None,
        new: Allocate = allocate,
    ) -> Bytes | None:
        """Return the `nbytes` stored under a key, in `new` memory or mapped; None if missing or damaged."""
        path = self.folder / (key + _SUFFIX)
        if not path.exists():
            return None
        try:
            entry = read_entry(path)
            if (entry.key, entry.nbytes) != (key, nbytes):
                raise Damaged("it belongs to another model")
            data = read_checked(entry, mapper, progress, self.shared, new)
        except (Damaged, OSError) as error:
            _LOG.warning("%s is damaged, and made again: %s", path, error)
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Wait, where weights are shared, until no other process reads or writes the file of a key."""
        if not self.shared:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / f".{key}{_UNFINISHED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.give_up(error)
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.utime(lock)  # or it is taken for a file that nobody finished
            yield
        finally:
            os.close(lock)

    def create(self, key: str, nbytes: int) -> PackedFileWriter | None:
        """Create a file for so many packed bytes; None, after a warning, if that is impossible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return (
                PackedFileWriter(self.folder / (key + _SUFFIX), nbytes, self.shared)
                if self._evict(nbytes)
                else None
            )
        except OSError as error:
            self.give_up(error)
        return None

    def give_up(self, error: OSError) -> None:
        """Log why packed weights are not cached."""
        _LOG.warning("packed weights are not kept in %s: %s", self.folder, error.strerror or error)

    def _evict(self, nbytes: int) -> bool:
        """Remove the least recently used files until `nbytes` fit within the limit; False if they cannot."""
        for path in self.folder.glob(".*" + _UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
        files = self._files()
        kept = sum(size for _, size, _ in files)
        limit = min(self.limit_bytes, (shutil.disk_usage(self.folder).free + kept) // 4)
        if nbytes > limit:
            _LOG.warning(
                "packed weights of %.1f GB are not kept: the cache may have %.1f", nbytes / 1e9, limit / 1e9
            )
            return False
        for _, size, path in files:
            if kept + nbytes > limit:
                kept -= size
                _remove(path)
        return True

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (last used, bytes, path) of each file, least recently used first."""
        found = []
        for path in self.folder.glob("*" + _SUFFIX):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def entries(self) -> list[PackedFile]:
        """Return the readable files, most recently used first."""
        found = []
        for _, _, path in reversed(self._files()):
            with contextlib.suppress(Damaged, OSError):
                found.append(read_entry(path))
        return found

    def unreadable(self) -> list[Path]:
        """Return the files without a readable description: foreign or damaged ones."""
        known = {entry.path for entry in self.entries()}
        return [path for _, _, path in self._files() if path not in known]

    def clear(self, model: str | None = None) -> tuple[int, int]:
        """Remove all files, or those of one model. Return (number, bytes)."""
        known = {entry.path: entry.model for entry in self.entries()}
        name = None if model is None else name_of(model)
        chosen = [file for file in self._files() if name is None or known.get(file[2]) == name]
        for _, _, path in chosen:
            _remove(path)
        return len(chosen), sum(size for _, size, _ in chosen)


class PackedFileWriter:
    """A file that appears in the cache once it is complete. Its methods raise OSError."""

    def __init__(self, path: Path, nbytes: int, shared: bool) -> None:
        self.path, self.nbytes, self._shared = path, nbytes, shared
        self._file, self._name = tempfile.mkstemp(_UNFINISHED, ".", path.parent)
        try:
            os.posix_fallocate(self._file, 0, nbytes)  # detects a full disk
        except OSError:
            self.close()
            raise

    def put(self, data: Bytes, start: int) -> None:
        """Write packed bytes at their offset."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._file, data[done:].data, start + done)

    def finish(self, model: str, quantization: str, mapper: Mapper, new: Allocate = allocate) -> Bytes:
        """Complete and rename the file; return its packed bytes, in `new` memory or mapped."""
        data = map_file(self._file, self.nbytes) if self._shared else new(self.nbytes)
        check = partial(_check if self._shared else _read, self._file, data)
        sums = list(mapper(check, _chunks(self.nbytes)))
        about = {"model": name_of(model), "quantization": quantization, "nbytes": self.nbytes, "sums": sums}
        text = json.dumps({"key": self.path.stem, **about}).encode()
        tail = len(text).to_bytes(8, "little") + _sum_of(text).to_bytes(8, "little") + _MARK
        self.put(np.frombuffer(text + tail, np.uint8), self.nbytes)
        os.replace(self._name, self.path)
        return data

    def close(self) -> None:
        """Remove the file if it was not finished."""
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self._name)  # fails if it was renamed already


def read_entry(path: Path) -> PackedFile:
    """Read the description at the end of a file. Raises Damaged, OSError."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        tail_at = status.st_size - _TAIL_BYTES
        tail = os.pread(file.fileno(), _TAIL_BYTES, max(tail_at, 0))
        length = int.from_bytes(tail[:8], "little")
        if tail[16:] != _MARK or length > min(tail_at, _JSON_LIMIT_BYTES):
            raise Damaged("its end is missing")
        text = os.pread(file.fileno(), length, tail_at - length)
    if _sum_of(text) != int.from_bytes(tail[8:16], "little"):
        raise Damaged("its description is not what was written")
    try:
        about = parse_object(text, str(path))
        key, model, scheme = str(about["key"]), str(about["model"]), str(about["quantization"])
        sums = tuple(map(int, about["sums"]))
        entry = PackedFile(path, key, model, scheme, int(about["nbytes"]), sums, status.st_mtime)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its description cannot be read: {error}") from error
    if entry.nbytes != tail_at - length or len(entry.sums) != len(_chunks(entry.nbytes)):
        raise Damaged("it has another size than it says")
    return entry


def read_checked(
    entry: PackedFile,
    mapper: Mapper,
    progress: Progress | None = None,
    shared: bool = False,
    new: Allocate = allocate,
) -> Bytes:
    """Read and verify the packed bytes of a file, or map them. Raises Damaged, OSError."""
    with open_regular(entry.path) as file:
        data = map_file(file.fileno(), entry.nbytes) if shared else new(entry.nbytes)
        check = partial(_check if shared else _read, file.fileno(), data)

        def work(number: int) -> int:
            if check(number) != entry.sums[number]:
                raise Damaged(f"bytes from {number * CHUNK_BYTES:,} on are not what was written")
            return _chunk(data, number).nbytes

        done = 0
        for count in mapper(work, _chunks(entry.nbytes)):
            done += count
            if progress is not None:
                progress(done, entry.nbytes)
    return data


def map_file(file: int, nbytes: int) -> Bytes:
    """Map the beginning of a file, in huge pages where the file system has them in its cache."""
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _check(file: int, data: Bytes, number: int) -> int:
    """Return the checksum of one chunk of a mapped file."""
    return int(_core.checksum(_chunk(data, number)))


def _read(file: int, data: Bytes, number: int) -> int:
    """Read one chunk of a file into the same place of `data`; return its checksum."""
    chunk, done = _chunk(data, number), 0
    while done < chunk.nbytes:
        count = os.preadv(file, [chunk[done:].data], number * CHUNK_BYTES + done)
        if count == 0:
            raise Damaged("it has become shorter")
        done += count
    return int(_core.checksum(chunk))


def _sum_of(text: bytes) -> int:
    return int(_core.checksum(np.frombuffer(text, np.uint8)))


def _chunks(nbytes: int) -> range:
    return range(-(-nbytes // CHUNK_BYTES))


def _chunk(data: Bytes, number: int) -> Bytes:
    return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
