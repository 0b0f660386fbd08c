"""The encoding of a block's content, in files and on links: verified bytes, or nothing.

    magic, version, number of groups, fingerprint, hash of the block      header
    (index of a cache group, bytes) of each group, by ascending index     table
    the content of each group, in the same order                          payload
    checksum of everything before it                                      8 bytes

Numbers are little endian. The checksum detects damage, not manipulation: whoever may write a file may write
its checksum.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from quire.backends.checksum import CHECKSUM_BYTES, checksum
from quire.block_store import BlockContent

FINGERPRINT_BYTES = HASH_BYTES = 32
MAX_GROUPS = 64
MAX_CONTENT_BYTES = 1 << 30

_MAGIC, _VERSION = b"quireblk", 1
_HEADER = struct.Struct(f"<8sHH{FINGERPRINT_BYTES}s{HASH_BYTES}s")
_GROUP = struct.Struct("<IQ")


def encode(fingerprint: bytes, block_hash: bytes, content: BlockContent) -> bytearray:
    """Return the encoded content of a block, computed under `fingerprint`."""
    groups = sorted(content)
    parts: list[bytes | memoryview] = [
        _HEADER.pack(_MAGIC, _VERSION, len(groups), fingerprint, block_hash),
        *(_GROUP.pack(group, len(content[group])) for group in groups),
        *(content[group] for group in groups),
        bytes(CHECKSUM_BYTES),
    ]
    frame = bytearray().join(parts)
    frame[-CHECKSUM_BYTES:] = checksum(memoryview(frame)[:-CHECKSUM_BYTES])
    return frame


def decode(frame: bytes | memoryview, fingerprint: bytes, block_hash: bytes) -> BlockContent | None:
    """Return the content of this block, as views of `frame`; None if it is not exactly that.

    `frame` may be anything at all.
    """
    frame = memoryview(frame)
    if not _HEADER.size + CHECKSUM_BYTES <= len(frame) <= MAX_CONTENT_BYTES:
        return None
    magic, version, num_groups, whose, which = _HEADER.unpack_from(frame)
    if (magic, version, whose, which) != (_MAGIC, _VERSION, fingerprint, block_hash):
        return None
    begin = _HEADER.size + num_groups * _GROUP.size
    if num_groups > MAX_GROUPS or begin + CHECKSUM_BYTES > len(frame):
        return None
    groups = list(_GROUP.iter_unpack(frame[_HEADER.size : begin]))
    if any(first >= second for (first, _), (second, _) in pairwise(groups)):
        return None
    if begin + sum(nbytes for _, nbytes in groups) + CHECKSUM_BYTES != len(frame):
        return None
    if checksum(frame[:-CHECKSUM_BYTES]) != frame[-CHECKSUM_BYTES:]:
        return None
    content = {}
    for group, nbytes in groups:
        content[group] = frame[begin : begin + nbytes]
        begin += nbytes
    return content


def content_bytes(content: BlockContent) -> int:
    """Return the bytes of a content in all groups."""
    return sum(map(len, content.values()))
