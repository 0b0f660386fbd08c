"""Blocks in segments on a disk, found again after a restart.

The engine's thread touches no file. One thread reads; another one writes, scans the folder and removes what
was used least recently. Whatever goes wrong with files, blocks are only absent.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Collection, Sequence
from queue import SimpleQueue

from quire.block_store import BlockContent, Found, StoreCounters
from quire.transfer.content import content_bytes, encode
from quire.transfer.pace import Pace
from quire.transfer.segment import EncodedBlock, group_bits, segment_bytes
from quire.transfer.segment_folder import SegmentFolder
from quire.transfer.segment_index import SegmentIndex

SEGMENT_BYTES = 8 << 20
WAITING_BYTES = 256 << 20  # put, and not yet written
FETCH_BYTES = 1 << 30  # of one fetch
FLUSH_S = 1.0  # a block waits so long for others before a segment is written
RESCAN_S = 2.0  # segments of other processes are noticed so late, while something is looked for
RETRY_S = 30.0  # until writing is tried again after a failure, and until the disk is measured again
PROBED_BLOCKS = 256  # of a segment, at most, are read to measure it

_LOG = logging.getLogger(__name__)


class DiskFetch:
    """Blocks that a thread reads. The reader appends to `arrived` and sets `done` at the end."""

    def __init__(self, hashes: list[bytes], waiting: dict[bytes, BlockContent]) -> None:
        self.hashes = hashes
        self.waiting = waiting  # those that are not written yet
        self.arrived: list[tuple[bytes, BlockContent]] = []
        self.done = False
        self.ended = False  # nobody waits for it any more

    @property
    def num_arrived(self) -> int:
        """Leading blocks that have arrived."""
        return len(self.arrived)

    def take(self) -> list[tuple[bytes, BlockContent]]:
        """End the fetch; return (hash, content) of the leading blocks that have arrived."""
        self.ended = True
        return list(self.arrived)


class DiskStore:
    """A BlockStore in a folder, for one fingerprint of 32 bytes. Segments of others only count as bytes."""

    def __init__(self, folder: SegmentFolder, fingerprint: bytes) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._index = SegmentIndex(folder, fingerprint)
        self._pace = Pace()
        self._waiting: dict[bytes, BlockContent] = {}
        self._waiting_bytes, self._waiting_since_s = 0, 0.0
        self._tail: tuple[str, list[EncodedBlock]] = "", []  # the last segment, while it is small
        self._lock = threading.Condition()  # of what waits and of the counters
        self._scanned_s = self._measured_s = self._failed_s = float("-inf")
        self._looked_up = self._closing = self._warned = False
        self._counters = StoreCounters()
        self._fetches: SimpleQueue[DiskFetch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"quire-store-{name}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # Called by the engine

    @property
    def ready(self) -> bool:
        """True once all segments that were there at the start are indexed."""
        return self._index.ready

    def find(self, hashes: Sequence[bytes]) -> Found:
        """Return how many leading blocks are here, and the predicted time to fetch them."""
        count = on_disk = num_bytes = 0
        for block_hash in hashes:
            if block_hash not in self._waiting:
                if (entry := self._index.get(block_hash)) is None:
                    break
                segment, place = entry
                if num_bytes + place.nbytes > FETCH_BYTES:
                    break
                segment.looked_up = True
                on_disk, num_bytes = on_disk + 1, num_bytes + place.nbytes
            count += 1
        if time.monotonic() - self._scanned_s > RESCAN_S:
            with self._lock:
                self._looked_up = True
                self._lock.notify()
        return Found(count, self._pace.predict(on_disk, num_bytes) if on_disk else 0.0)

    def fetch(self, hashes: Sequence[bytes]) -> DiskFetch:
        """Begin to read these blocks."""
        with self._lock:
            waiting = {name: self._waiting[name] for name in hashes if name in self._waiting}
        fetch = DiskFetch(list(hashes), waiting)
        self._fetches.put(fetch)
        return fetch

    @property
    def busy(self) -> bool:
        """True while so much waits to be written that nothing is wanted: ask again later."""
        return self._waiting_bytes >= WAITING_BYTES and not self._fails()

    def wants(self, block_hash: bytes, groups: Collection[int]) -> bool:
        """Return True if a block is not here with all of these groups, and there is room for it now."""
        if (waiting := self._waiting.get(block_hash)) is not None:
            here = all(group in waiting for group in groups)
        else:
            entry, bits = self._index.get(block_hash), group_bits(groups)
            here = entry is not None and entry[1].groups & bits == bits
        return not here and self._waiting_bytes < WAITING_BYTES and not self._fails()

    def put(self, block_hash: bytes, content: BlockContent) -> None:
        """Have a block written, unless too much is waiting already. It replaces one that is here."""
        with self._lock:
            if self._closing or self._waiting_bytes >= WAITING_BYTES or self._fails():
                self._count(num_declined=1)
                return
            if not self._waiting:
                self._waiting_since_s = time.monotonic()
            self._waiting_bytes += content_bytes(content) - content_bytes(self._waiting.get(block_hash, {}))
            self._waiting[block_hash] = content
            self._lock.notify()

    def counters(self) -> dict[str, StoreCounters]:
        """Return what is in the index, and what was done, as those of "disk"."""
        index = self._index
        now = {"num_blocks": len(index), "num_bytes": index.num_bytes, "num_damaged": index.num_damaged}
        return {"disk": self._counters._replace(**now)}

    def close(self) -> None:
        """Write what waits, and end the threads."""
        atexit.unregister(self.close)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._lock.notify()
        self._fetches.put(None)
        for thread in self._threads:
            thread.join()
        self._folder.close()

    def _fails(self) -> bool:
        return time.monotonic() - self._failed_s < RETRY_S

    def _count(self, **more: int) -> None:
        counts = self._counters
        self._counters = counts._replace(**{name: getattr(counts, name) + n for name, n in more.items()})

    # The thread that reads

    def _read_all(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            try:
                self._read(fetch)
            except Exception as error:  # a thread that ends would leave every later fetch undone
                self._warn("read", error)
            fetch.done = True

    def _read(self, fetch: DiskFetch) -> None:
        """Read the blocks of a fetch: those that wait to be written are here, the others in segments."""
        hashes, waiting, arrived = fetch.hashes, fetch.waiting, fetch.arrived
        while (first := len(arrived)) < len(hashes) and not fetch.ended:
            if hashes[first] in waiting:
                arrived.append((hashes[first], waiting[hashes[first]]))
                continue
            rest = range(first, len(hashes))
            last = next((number for number in rest if hashes[number] in waiting), len(hashes))
            self._read_segments(fetch, hashes[first:last])
            if len(arrived) < last:
                break
        with self._lock:
            self._count(num_fetched=len(arrived))

    def _read_segments(self, fetch: DiskFetch, hashes: list[bytes]) -> None:
        """Read these blocks, and learn how long it takes."""
        began_s, before, num_bytes = time.monotonic(), len(fetch.arrived), 0
        for block_hash, content in self._index.read(hashes):
            fetch.arrived.append((block_hash, content))
            num_bytes += content_bytes(content)
            if fetch.ended:
                break
        self._measured_s = time.monotonic()
        if (num_blocks := len(fetch.arrived) - before) > 0:
            self._pace.learn(num_blocks, num_bytes, self._measured_s - began_s)

    # The thread that writes

    def _write_all(self) -> None:
        while True:
            try:
                if not self._write_some():
                    return
            except Exception as error:  # as above: what waits is dropped, and writing tried again later
                self._give_up(error)

    def _write_some(self) -> bool:
        """Do what is due: scan the folder, measure the disk, write a segment. Return False at the end."""
        if self._looked_up or not self.ready:
            self._scanned_s, self._looked_up = time.monotonic(), False
            self._index.scan()
            self._measure()
        with self._lock:
            if not (self._closing or self._looked_up or self._full()):
                self._lock.wait(self._patience_s())
            batch = self._batch() if self._full() or self._closing or self._patience_s() == 0 else {}
            ending = self._closing and not batch
        if batch:
            self._write(batch)
        return not ending

    def _measure(self) -> None:
        """Read a part of some segment, if nothing was read for a while, for the prediction of fetches."""
        if time.monotonic() - self._measured_s >= RETRY_S and (some := self._index.sample(PROBED_BLOCKS)):
            self._read_segments(DiskFetch(some, {}), some)

    def _full(self) -> bool:
        return self._waiting_bytes >= SEGMENT_BYTES

    def _patience_s(self) -> float | None:
        """Return how long to wait before a segment is written although it is small; None without blocks."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting_since_s + FLUSH_S - time.monotonic())

    def _batch(self) -> dict[bytes, BlockContent]:
        """Return the waiting blocks for the next segment, which still wait until it is written."""
        batch, nbytes = {}, 0
        for block_hash, content in self._waiting.items():
            batch[block_hash] = content
            nbytes += content_bytes(content)
            if nbytes >= SEGMENT_BYTES:
                break
        return batch

    def _write(self, batch: dict[bytes, BlockContent]) -> None:
        """Write a segment of these blocks, and of those of the last segment if it is small."""
        blocks = [
            EncodedBlock(block_hash, group_bits(content), encode(self._fingerprint, block_hash, content))
            for block_hash, content in batch.items()
        ]
        replaced, tail = self._tail
        tail = [block for block in tail if block.block_hash not in batch]
        if segment_bytes(tail + blocks) > SEGMENT_BYTES:
            replaced, tail = "", []
        name, removed = self._folder.write(self._fingerprint, tail + blocks)
        self._warned = False
        num_evicted = self._index.forget(removed)
        self._index.add(name)
        if replaced:
            self._folder.remove(replaced)
            self._index.forget([replaced])
        small = segment_bytes(tail + blocks) < SEGMENT_BYTES // 2
        self._tail = (name, tail + blocks) if small else ("", [])
        with self._lock:
            self._count(num_stored=len(blocks), num_evicted=num_evicted)
            self._unqueue(batch)

    def _unqueue(self, batch: dict[bytes, BlockContent]) -> None:
        """Take blocks out of those that wait, but for those that were put again in the meantime."""
        for name, content in batch.items():
            if self._waiting.get(name) is content:
                self._waiting_bytes -= content_bytes(self._waiting.pop(name))
        self._waiting_since_s = time.monotonic()

    def _give_up(self, error: Exception) -> None:
        """Drop what waits, after a failure; writing is tried again later."""
        self._warn("written", error)
        self._index.ready = True
        with self._lock:
            self._failed_s = time.monotonic()
            self._tail = "", []
            self._count(num_declined=len(self._waiting))
            self._unqueue(dict(self._waiting))

    def _warn(self, done: str, error: Exception) -> None:
        """Say once that the folder does not serve, until it does again."""
        if not self._warned:
            self._warned = True
            where = self._folder.path
            _LOG.warning(
                "prefix cache: %s cannot be %s (%s); prompts are computed instead", where, done, error
            )
