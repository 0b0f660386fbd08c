"""Files of a model folder, opened only if they are regular files, and read with a size limit.

A known name may be that of a directory, an endless device, a pipe without a writer or a dangling link: each
is reported at once by an error that says so.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from quire.errors import ConfigError

_POINTER = b"version "  # how those of Git LFS begin
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def hint_for(begin: bytes) -> str:
    """Return what to do about a file that begins so, and is not what its name says."""
    if begin.startswith(_POINTER):
        return "it is a pointer of Git LFS to the file: run 'git lfs pull' in the folder, or download it"
    return "the file is damaged or incomplete: fetch it again"


def present(path: Path) -> bool:
    """Return True if anything has this name, even a broken link. What is present is read or is an error."""
    return os.path.lexists(path)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking. Raises OSError, also if it is not a regular file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise _not_regular(path, stat.S_IFSOCK) from None
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        raise _not_regular(path, mode)
    return open(file, "rb")


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Read the bytes of a file. Raises ConfigError: missing, not a regular file, too large."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            text = (file.read(limit_bytes + 1) or b"") if size <= limit_bytes else b""
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if max(size, len(text)) > limit_bytes:
        size = max(size, len(text))
        raise ConfigError(f"{path}: {size:,} bytes are too many for this file (limit {limit_bytes:,})")
    return text


def _not_regular(path: Path, mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
