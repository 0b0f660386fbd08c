"""Parcels: contents of blocks on their way from one engine to another.

A transport makes parcels of contents, and what it makes can be sent in a message of any kind. Two are here:
bytes within the message, for links between hosts, and a file in shared memory, for processes of one host.
Another one, such as NIXL or Mooncake, is one more class with `pack`, and one more kind of parcel with `open`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from quire.block_store import BlockContent
from quire.transfer.content import decode, encode

PARCEL_BYTES = 4 << 20  # in a message, so that others pass between two of them
STALE_S = 600.0  # a file in shared memory that nobody opened is removed after that time
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"quire-[0-9a-f]{32}")


class Parcel(msgspec.Struct, tag=True, array_like=True):
    """Encoded contents of blocks with these hashes, in order."""

    hashes: list[bytes]

    def open(self) -> Sequence[bytes | memoryview]:
        """Return the encoded content of each block, once; fewer, or none, if they are gone."""
        raise NotImplementedError

    def discard(self) -> None:
        """Release the contents, which nobody wants."""
        self.open()

    @property
    def num_bytes(self) -> int:
        """The bytes of these contents."""
        raise NotImplementedError


class InlineParcel(Parcel):
    """Contents within the message."""

    frames: list[bytes]

    def open(self) -> Sequence[bytes | memoryview]:
        return self.frames

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frames))


class SharedParcel(Parcel):
    """Contents one after the other in a file in shared memory, which whoever opens the parcel removes."""

    name: str
    lengths: list[int]

    def open(self) -> Sequence[bytes | memoryview]:
        memory = _take_file(self.name, sum(self.lengths)) if _NAME.fullmatch(self.name) else None
        if memory is None or min(self.lengths) < 0:
            return []
        frames, begin = [], 0
        for length in self.lengths:
            frames.append(memory[begin : begin + length])
            begin += length
        return frames

    @property
    def num_bytes(self) -> int:
        return max(0, sum(self.lengths))  # as the other side says


AnyParcel = InlineParcel | SharedParcel


class Transport(Protocol):
    """One way to move contents."""

    def pack(self, fingerprint: bytes, contents: Iterable[tuple[bytes, BlockContent]]) -> Iterator[AnyParcel]:
        """Yield parcels of these (hash, content), computed under a fingerprint, in order."""


class InlineTransport:
    """Contents within messages of a bounded size."""

    def pack(
        self, fingerprint: bytes, contents: Iterable[tuple[bytes, BlockContent]]
    ) -> Iterator[InlineParcel]:
        """See Transport."""
        parcel, nbytes = InlineParcel([], []), 0
        for block_hash, content in contents:
            frame = bytes(encode(fingerprint, block_hash, content))
            if parcel.frames and nbytes + len(frame) > PARCEL_BYTES:
                yield parcel
                parcel, nbytes = InlineParcel([], []), 0
            parcel.hashes.append(block_hash)
            parcel.frames.append(frame)
            nbytes += len(frame)
        if parcel.frames:
            yield parcel


class SharedTransport:
    """Contents in files in shared memory that only the user can read."""

    def pack(self, fingerprint: bytes, contents: Iterable[tuple[bytes, BlockContent]]) -> Iterator[AnyParcel]:
        """See Transport. Where shared memory is full, contents are within messages."""
        _remove_stale()
        for inline in InlineTransport().pack(fingerprint, contents):
            name = f"quire-{secrets.token_hex(16)}"
            try:
                _write_file(name, inline.frames)
            except OSError:
                yield inline
            else:
                yield SharedParcel(inline.hashes, name, [len(frame) for frame in inline.frames])


def unpack(parcel: Parcel, fingerprint: bytes) -> Iterator[tuple[bytes, BlockContent]]:
    """Yield (hash, content) of the leading blocks of a parcel that are whole and of this fingerprint."""
    for block_hash, frame in zip(parcel.hashes, parcel.open(), strict=False):
        content = decode(frame, fingerprint, block_hash)
        if content is None:
            return
        yield block_hash, content


def _write_file(name: str, frames: Iterable[bytes]) -> None:
    path = _FOLDER / name
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for frame in frames:
            done = 0
            while done < len(frame):
                done += os.write(file, memoryview(frame)[done:])
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def _take_file(name: str, nbytes: int) -> memoryview | None:
    """Map a file of this user and remove its name; None unless it is there and has this size."""
    path = _FOLDER / name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size != nbytes:
            return None
        path.unlink()
        return memoryview(mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _remove_stale() -> None:
    """Remove files of this user that were never opened, as those of engines that died."""
    for path in _FOLDER.glob("quire-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            own = _NAME.fullmatch(path.name) and status.st_uid == os.getuid()
            if own and time.time() - status.st_mtime > STALE_S:
                path.unlink()
