"""Segments: files of several encoded blocks, written once and never modified.

    magic, version, number of blocks, fingerprint      header
    (hash, bytes, cache groups) of each block          table
    checksum of everything before it                   8 bytes
    the blocks, encoded as in content.py, in the order of the table

The table tells what is inside without reading the blocks. A block is a small file's worth for a small model
and half a megabyte for a model of 1 B: in segments, neither costs an open file each.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from quire.backends.checksum import CHECKSUM_BYTES, checksum
from quire.transfer.content import FINGERPRINT_BYTES, HASH_BYTES, MAX_CONTENT_BYTES

MAX_BLOCKS = 1 << 16  # of a segment
# Blocks that follow each other are read together, up to so many bytes: few at first, since whoever waits
# gives up soon if nothing arrives, then twice as many each time.
FIRST_BYTES, READ_BYTES = 1 << 17, 4 << 20

_MAGIC, _VERSION = b"quireseg", 1
_HEADER = struct.Struct(f"<8sHxxI{FINGERPRINT_BYTES}s")
_ENTRY = struct.Struct(f"<{HASH_BYTES}sIQ")
# Nothing but a regular file is opened, without waiting for the writer of a pipe, and through no link.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class BlockPlace(NamedTuple):
    """The place of a block's encoded content within a segment, and the groups it has, as bits."""

    offset: int
    nbytes: int
    groups: int


class EncodedBlock(NamedTuple):
    """A block to be written."""

    block_hash: bytes
    groups: int  # as bits
    frame: bytes | bytearray


def group_bits(groups: Iterable[int]) -> int:
    """Return indices of cache groups as bits of a number."""
    return sum(1 << group for group in set(groups))


class DamagedSegment(Exception):
    """A segment that is not what its name says."""


def open_segment(name: str, folder: int) -> int:
    """Open a file in a folder that is open as `folder`. Raises OSError, also if it is no regular file."""
    file = os.open(name, _READ_FLAGS, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return file


def segment_bytes(blocks: Sequence[EncodedBlock]) -> int:
    """Return the size of a segment with these blocks."""
    return _HEADER.size + CHECKSUM_BYTES + sum(_ENTRY.size + len(block.frame) for block in blocks)


def segment_parts(fingerprint: bytes, blocks: Sequence[EncodedBlock]) -> list[bytes | bytearray]:
    """Return the parts of a segment with these blocks, to be written one after another."""
    entries = (_ENTRY.pack(block.block_hash, len(block.frame), block.groups) for block in blocks)
    head = _HEADER.pack(_MAGIC, _VERSION, len(blocks), fingerprint) + b"".join(entries)
    return [head, checksum(head), *(block.frame for block in blocks)]


def read_table(file: int, fingerprint: bytes) -> list[tuple[bytes, BlockPlace]]:
    """Return the hash and place of each block of an open segment. Raises DamagedSegment and OSError."""
    size = os.fstat(file).st_size
    head = os.pread(file, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise DamagedSegment("it is too short")
    magic, version, count, whose = _HEADER.unpack(head)
    if (magic, version, whose) != (_MAGIC, _VERSION, fingerprint) or count > MAX_BLOCKS:
        raise DamagedSegment("it belongs to something else")
    table = os.pread(file, count * _ENTRY.size, len(head))
    begin = len(head) + count * _ENTRY.size
    if checksum(head + table) != os.pread(file, CHECKSUM_BYTES, begin):
        raise DamagedSegment("its table is damaged")
    offset, places = begin + CHECKSUM_BYTES, []
    for block_hash, nbytes, groups in _ENTRY.iter_unpack(table):
        if nbytes > MAX_CONTENT_BYTES:
            raise DamagedSegment("a block is too large")
        places.append((block_hash, BlockPlace(offset, nbytes, groups)))
        offset += nbytes
    if offset != size:
        raise DamagedSegment("it is not as long as its blocks")
    return places


def read_frames(file: int, places: Sequence[BlockPlace]) -> Iterator[memoryview]:
    """Read the encoded contents at these places, in order, those that follow each other together.

    Raises DamagedSegment if the file has become shorter, and OSError.
    """
    first, most_bytes = 0, FIRST_BYTES
    while first < len(places):
        last, end = first, places[first].offset
        begin = end
        while last < len(places) and places[last].offset == end:
            if last > first and end + places[last].nbytes - begin > most_bytes:
                break
            end += places[last].nbytes
            last += 1
        data = memoryview(_read(file, begin, end - begin))
        for place in places[first:last]:
            yield data[place.offset - begin :][: place.nbytes]
        first, most_bytes = last, min(2 * most_bytes, READ_BYTES)


def _read(file: int, offset: int, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = os.pread(file, nbytes, offset)
        if not part:
            raise DamagedSegment("it has become shorter")
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
