"""The index of a folder of segments: in which segment each block of one fingerprint is.

It is built from the tables of segments, and forgets what cannot be read. Any thread may look blocks up,
which takes no lock, and read them.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from quire.block_store import BlockContent
from quire.transfer.content import decode
from quire.transfer.segment import BlockPlace, DamagedSegment, read_frames, read_table
from quire.transfer.segment_folder import SegmentFolder, prefix_of

MAX_INDEXED = 1 << 18  # blocks; the index takes about 60 MB then

_LOG = logging.getLogger(__name__)


class IndexedSegment:
    """An indexed segment. `looked_up`: one of its blocks was, since its time of use was last set."""

    __slots__ = ("looked_up", "name", "nbytes", "places")

    def __init__(self, name: str, nbytes: int, places: list[tuple[bytes, BlockPlace]]) -> None:
        self.name, self.nbytes, self.places = name, nbytes, places
        self.looked_up = False


class SegmentIndex:
    """The places of the blocks of `fingerprint`. `num_damaged` counts those in segments that were damaged."""

    def __init__(self, folder: SegmentFolder, fingerprint: bytes) -> None:
        self.num_damaged = 0
        self.ready = False  # all segments that were there at the start are indexed
        self._folder, self._fingerprint = folder, fingerprint
        self._blocks: dict[bytes, tuple[IndexedSegment, BlockPlace]] = {}
        self._segments: dict[str, IndexedSegment] = {}  # the oldest first
        self._left_out: set[str] = set()  # segments that are not indexed
        self._lock = threading.Lock()  # of changes
        self._version = -1  # of the folder, when it was scanned

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_hash: bytes) -> tuple[IndexedSegment, BlockPlace] | None:
        """Return the segment that has a block, and its place there."""
        return self._blocks.get(block_hash)

    @property
    def num_bytes(self) -> int:
        """Bytes of all indexed segments."""
        with self._lock:
            return sum(segment.nbytes for segment in self._segments.values())

    def sample(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of the first blocks of some segment, at most so many."""
        with self._lock:
            if not self._segments:
                return []
            return [name for name, _ in random.choice(list(self._segments.values())).places[:num_blocks]]

    # Reading

    def read(self, hashes: Sequence[bytes]) -> Iterator[tuple[bytes, BlockContent]]:
        """Read the leading blocks, segment by segment, up to the first that is absent or damaged.

        A segment that cannot be read is forgotten, so another one that has a block is tried next, if any.
        """
        number = 0
        while number < len(hashes):
            segment, places = self._run(hashes, number)
            if segment is None:
                return
            for content in self._contents(segment, hashes[number : number + len(places)], places):
                yield hashes[number], content
                number += 1

    def _run(self, hashes: Sequence[bytes], first: int) -> tuple[IndexedSegment | None, list[BlockPlace]]:
        """Return the segment of a block, and the places of it and of those after it in the same segment."""
        segment: IndexedSegment | None = None
        places: list[BlockPlace] = []
        for number in range(first, len(hashes)):
            entry = self._blocks.get(hashes[number])
            if entry is None or (segment is not None and entry[0] is not segment):
                break
            segment = entry[0]
            places.append(entry[1])
        return segment, places

    def _contents(
        self, segment: IndexedSegment, hashes: Sequence[bytes], places: Sequence[BlockPlace]
    ) -> Iterator[BlockContent]:
        """Read blocks of one segment, until one is damaged."""
        try:
            file = self._folder.open(segment.name)
            try:
                for block_hash, frame in zip(hashes, read_frames(file, places), strict=True):
                    content = decode(frame, self._fingerprint, block_hash)
                    if content is None:
                        raise DamagedSegment("a block is damaged")
                    yield content
            finally:
                os.close(file)
        except DamagedSegment as error:
            self._drop_damaged(segment.name, error)
        except OSError:  # it is gone, or cannot be read now: the next scan tells
            self.forget([segment.name])

    # Changes

    def scan(self) -> None:
        """Index the segments that appeared in the folder, and forget those that disappeared. Raises OSError.

        The times of use of those that were looked up are set first.
        """
        with self._lock:
            used = [segment for segment in self._segments.values() if segment.looked_up]
        for segment in used:
            segment.looked_up = False
            self._folder.touch(segment.name)
        version = self._folder.version()
        if version != self._version:
            prefix = prefix_of(self._fingerprint)
            self._index([file.name for file in self._folder.files() if file.name.startswith(prefix)])
        self._version, self.ready = version, True

    def _index(self, names: list[str]) -> None:
        """Index all of these segments, or those that were used last if they have too many blocks."""
        self.forget(self._segments.keys() - set(names))
        self._left_out &= set(names)
        segments, room = [], MAX_INDEXED
        for name in reversed(names):
            if name in self._segments or name in self._left_out:
                continue
            if room <= 0:
                self._left_out.add(name)
            elif (found := self._open(name)) is not None:
                segments.append(found)
                room -= len(found.places)
        for segment in reversed(segments):
            self._add(segment)

    def add(self, name: str) -> None:
        """Index a new segment."""
        if (segment := self._open(name)) is not None:
            self._add(segment)

    def forget(self, names: Iterable[str]) -> int:
        """Take segments out of the index; return how many blocks are gone with them."""
        count = 0
        with self._lock:
            for name in names:
                segment = self._segments.pop(name, None)
                for block_hash, _ in segment.places if segment is not None else ():
                    if self._blocks.get(block_hash, (None,))[0] is segment:
                        del self._blocks[block_hash]
                        count += 1
        return count

    def _open(self, name: str) -> IndexedSegment | None:
        """Read what is in a segment; None if it cannot be read now, or is damaged and removed."""
        with suppress(OSError):
            file = self._folder.open(name)
            try:
                return IndexedSegment(name, os.fstat(file).st_size, read_table(file, self._fingerprint))
            except DamagedSegment as error:
                self._drop_damaged(name, error)
            finally:
                os.close(file)
        return None

    def _add(self, segment: IndexedSegment) -> None:
        """Add a segment. If the index becomes too large, the oldest leave it.

        Of contents of one block, the one with more groups is indexed.
        """
        with self._lock:
            self._segments[segment.name] = segment
            for block_hash, place in segment.places:
                entry = self._blocks.get(block_hash)
                if entry is None or entry[1].groups.bit_count() <= place.groups.bit_count():
                    self._blocks[block_hash] = segment, place
        while len(self._blocks) > MAX_INDEXED and len(self._segments) > 1:
            self._leave_out(next(iter(self._segments)))

    def _leave_out(self, name: str) -> None:
        self._left_out.add(name)
        self.forget([name])

    def _drop_damaged(self, name: str, error: Exception) -> None:
        """Remove a damaged segment. The first is reported; all are counted."""
        if not self.num_damaged:
            _LOG.warning("%s is damaged, and removed: %s", self._folder.path / name, error)
        self._folder.remove(name)
        self.num_damaged += self.forget([name]) or 1
