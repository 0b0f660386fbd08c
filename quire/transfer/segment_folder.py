"""A folder of segments with a limit on its bytes, shared by any number of processes.

Segments appear by renaming and are never modified: a reader sees a whole one or none. Which is removed first
is decided by their modification times, which are set when they are used, so that the order outlives all
processes. They are not synced to disk: damage by a crash is detected when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.regular_file import open_regular
from quire.transfer.segment import EncodedBlock, open_segment, segment_bytes, segment_parts

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.(blocks|tmp)")
_SECRET = "secret"
SECRET_BYTES = 32
_STALE_S = 3600.0  # a file unfinished after an hour is abandoned


class SegmentFile(NamedTuple):
    """A segment by its name. `used_s` is when it was last read or written, in seconds since 1970."""

    name: str
    nbytes: int
    used_s: float


class SegmentFolder:
    """The segments of one folder, at most `limit_bytes` in total; the least recently used are removed.

    Raises ConfigError where the folder cannot be used (`open_folder`).
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self._folder = open_folder(path)

    def version(self) -> int:
        """Return a number that changes when segments appear or disappear. Raises OSError."""
        return os.fstat(self._opened()).st_mtime_ns

    def files(self) -> list[SegmentFile]:
        """Return all finished segments, the least recently used first. Raises OSError."""
        found = []
        with os.scandir(self._opened()) as entries:
            for entry in entries:
                if not _NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(SegmentFile(entry.name, status.st_size, status.st_mtime))
        now = time.time()
        for file in found:
            if file.name.endswith(".tmp") and now - file.used_s > _STALE_S:
                self.remove(file.name)
        return sorted((file for file in found if file.name.endswith(".blocks")), key=lambda file: file.used_s)

    def open(self, name: str) -> int:
        """Open a segment for reading. Raises OSError and DamagedSegment."""
        return open_segment(name, self._folder)

    def write(self, fingerprint: bytes, blocks: list[EncodedBlock]) -> tuple[str, list[str]]:
        """Write a segment; return its name, and the names of those removed for it. Raises OSError."""
        removed = self.make_room(segment_bytes(blocks))
        name = f"{prefix_of(fingerprint)}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = self._opened()
        file = os.open(f"{name}.tmp", flags, 0o600, dir_fd=folder)
        try:
            with open(file, "wb") as opened:
                opened.writelines(segment_parts(fingerprint, blocks))
            os.rename(f"{name}.tmp", f"{name}.blocks", src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            self.remove(f"{name}.tmp")
            raise
        return f"{name}.blocks", removed

    def make_room(self, nbytes: int) -> list[str]:
        """Remove what was used least recently, for `nbytes` more within the limit; return its names.

        Raises OSError.
        """
        files, removed = self.files(), []
        if nbytes > self.limit_bytes:
            raise OSError(errno.EFBIG, f"a block of {nbytes:,} bytes is over the limit of the folder")
        total = sum(file.nbytes for file in files) + nbytes
        for file in files:
            if total <= self.limit_bytes:
                break
            self.remove(file.name)
            removed.append(file.name)
            total -= file.nbytes
        return removed

    def touch(self, name: str) -> None:
        """Note that a segment was used."""
        with contextlib.suppress(OSError):
            os.utime(name, dir_fd=self._folder, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a segment, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)

    def _opened(self) -> int:
        """Return the open folder, made again if it was removed. Raises OSError."""
        if os.fstat(self._folder).st_nlink == 0:
            again = _make_and_open(self.path)
            os.dup2(again, self._folder, inheritable=False)
            os.close(again)
        return self._folder


def prefix_of(fingerprint: bytes) -> str:
    """Return the beginning of the names of all segments of a fingerprint."""
    return fingerprint.hex()[:32]


def open_folder(path: Path) -> int:
    """Open a folder, made if it is not there.

    Raises ConfigError where it cannot be made, or belongs to others or may be written by them: what is in it
    decides what a model answers.
    """
    try:
        folder = _make_and_open(path)
    except OSError as error:
        raise ConfigError(
            f"prefix_cache_dir {str(path)!r} cannot be used: {error.strerror}",
            "name a folder that can be written, or leave it out",
        ) from error
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise ConfigError(
            f"prefix_cache_dir {str(path)!r} belongs to other users, or may be written by them",
            f"its content decides what a model answers: chmod 700 {path}, or name a new folder",
        )
    return folder


def folder_secret(path: Path) -> bytes:
    """Return the secret that a folder keeps for whoever uses it, made when it is first asked for.

    Salts that are derived from it stay the same after a restart. Raises ConfigError.
    """
    folder = open_folder(path)
    try:
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError), open_regular(path / _SECRET) as file:
                if len(secret := file.read(SECRET_BYTES + 1)) == SECRET_BYTES:
                    return secret
                raise ConfigError(f"{path / _SECRET} is damaged", "remove it, and the folder with it")
            _make_secret(folder)
    except OSError as error:
        raise ConfigError(f"{path / _SECRET} cannot be used: {error.strerror}") from error
    finally:
        os.close(folder)
    raise ConfigError(f"{path / _SECRET} disappears")


def _make_secret(folder: int) -> None:
    """Create the file of the secret, whole, unless another process does at the same time."""
    unfinished = f"{_SECRET}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, _SECRET, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(unfinished, dir_fd=folder)


def _make_and_open(path: Path) -> int:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
