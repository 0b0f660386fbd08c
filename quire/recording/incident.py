"""Incident files: what led to an incident, as chunks of a journal behind two headers.

A file is MAGIC, then frames: the length of a message in four bytes, then the message in msgpack. The first
is an Incident, the second a Header, each further one a list of entries. Files are read as untrusted input.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.errors import ConfigError, quoted
from quire.recording.entries import AnyEntry, Began
from quire.regular_file import read_limited

MAGIC = b"quire incident 2\n"
MAX_FILE_BYTES = 2 << 30
MAX_SLOTS, MAX_BLOCKS, MAX_VOCABULARY = 1 << 16, 1 << 24, 1 << 31  # that a file may ask for
MAX_LENGTH = 1 << 26  # tokens of a sequence
YEAR_10000_S = 253_402_300_800
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_ENTRIES = msgspec.msgpack.Decoder(list[AnyEntry])
T = TypeVar("T")


class GroupShape(NamedTuple):
    """A cache group: `num_blocks` within a window, if any; or, with `every`, snapshots of states."""

    num_blocks: int
    window: int | None = None
    every: int | None = None

    @classmethod
    def of(cls, group: Group) -> GroupShape:
        if isinstance(group, BlockGroup):
            return cls(group.num_blocks, group.window)
        return cls(group.num_snapshots, None, group.every)

    def group(self) -> Group:
        """Return the cache group."""
        if self.every is not None:
            return StateGroup(self.num_blocks, self.every)
        return BlockGroup(self.num_blocks, self.window)


class Header(msgspec.Struct, kw_only=True):
    """All that determines the plans of an engine, and its bits.

    `build` is a digest of the package with its native library, `arithmetic` the instruction set, `checkpoint`
    a digest of the configuration and the headers of the weights. `arguments` are those of the scheduler.
    """

    quire: str
    build: str
    arithmetic: str
    checkpoint: str
    contents: bool
    config: EngineConfig
    groups: tuple[GroupShape, ...]
    arguments: dict[str, Any]
    vocab_size: int

    def check(self) -> None:
        """Raise ValueError for sizes that no engine has."""
        sizes = self.arguments
        if not 0 < int(sizes["max_num_seqs"]) <= MAX_SLOTS or int(sizes["block_size"]) < 1:
            raise ValueError("the number of slots or the size of blocks is out of range")
        if not 0 < int(sizes["max_model_len"]) <= MAX_LENGTH:
            raise ValueError("the length of sequences is out of range")
        if not 0 < self.vocab_size <= MAX_VOCABULARY:
            raise ValueError("the size of the vocabulary is out of range")
        if sum(group.num_blocks for group in self.groups) > MAX_BLOCKS:
            raise ValueError("there are too many blocks")
        if any(min(one.num_blocks, one.window or 1, one.every or 1) < 0 for one in self.groups):
            raise ValueError("a cache group is smaller than nothing")


class Incident(msgspec.Struct):
    """The reason a file was written, and when, in seconds since 1970."""

    reason: str
    written_s: float

    def check(self) -> None:
        """Raise ValueError for a time that no calendar has."""
        if not 0 <= self.written_s < YEAR_10000_S:
            raise ValueError("the time it was written is out of range")


class Recording(NamedTuple):
    """The content of an incident file. Entries are decoded as they are iterated over."""

    where: str
    incident: Incident
    header: Header
    chunks: tuple[memoryview, ...]

    def entries(self) -> Iterator[AnyEntry]:
        """Yield the entries, the beginning of an epoch first. Raises ConfigError for invalid ones."""
        for number, chunk in enumerate(self.chunks):
            decoded = _decoded(_ENTRIES, chunk, f"{self.where}: chunk {number}")
            if not number and not (decoded and isinstance(decoded[0], Began)):
                raise ConfigError(f"{self.where}: it does not begin with an epoch")
            yield from decoded


def write_incident(path: Path, incident: Incident, header: bytes, chunks: Iterable[bytes]) -> int:
    """Write a file that only its owner may read, whole or not at all; return its size. Raises OSError."""
    partial = path.with_suffix(".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(MAGIC)
            for message in (_ENCODER.encode(incident), header, *chunks):
                file.write(_LENGTH.pack(len(message)))
                file.write(message)
            size = file.tell()
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


def read_incident(path: Path) -> Recording:
    """Read a file. Raises ConfigError for one that is missing, too large, or not an incident file."""
    content = memoryview(read_limited(path, MAX_FILE_BYTES))
    where = str(path)
    if content[: len(MAGIC)] != MAGIC:
        raise ConfigError(
            f"{where}: not an incident file of this version of Quire", "`quire serve --record` writes them"
        )
    frames = list(_frames(content[len(MAGIC) :], where))
    if len(frames) < 3:
        raise ConfigError(f"{where}: the file ends before the first epoch")
    incident = _decoded(msgspec.msgpack.Decoder(Incident), frames[0], f"{where}: incident")
    header = _decoded(msgspec.msgpack.Decoder(Header), frames[1], f"{where}: header")
    for name, part in (("incident", incident), ("header", header)):
        try:
            part.check()
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    return Recording(where, incident, header, tuple(frames[2:]))


def _frames(content: memoryview, where: str) -> Iterator[memoryview]:
    begin = 0
    while begin < len(content):
        end = begin + _LENGTH.size
        if end <= len(content):
            end += _LENGTH.unpack_from(content, begin)[0]
        if end > len(content):
            raise ConfigError(f"{where}: the file ends within a frame", "it was not written whole")
        yield content[begin + _LENGTH.size : end]
        begin = end


def _decoded(decoder: msgspec.msgpack.Decoder[T], message: memoryview, place: str) -> T:
    try:
        return decoder.decode(message)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{place}: {quoted(str(error))}") from None
