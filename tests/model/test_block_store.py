"""Stores of blocks in memory and on disk: what is found again, what is not, and that nobody waits."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from damaged_segments import check_folder
from stores import await_index, fetched, wait_until

from quire.block_store import BlockContent
from quire.errors import ConfigError
from quire.transfer import disk_store, segment, segment_index
from quire.transfer.disk_store import DiskStore
from quire.transfer.memory_store import MemoryStore
from quire.transfer.pace import Pace
from quire.transfer.segment_folder import SegmentFolder, folder_secret

FINGERPRINT = sha256(b"model").digest()
HASHES = [sha256(f"block {number}".encode()).digest() for number in range(40)]
LIMIT = 1 << 30
Open = Callable[..., DiskStore]


def content(number: int, nbytes: int = 100) -> BlockContent:
    return {0: number.to_bytes(2, "big") * (nbytes // 2), 3: b"state"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """A function that opens a store in the folder; all are closed at the end."""
    stores = []

    def opened(limit_bytes: int = LIMIT, fingerprint: bytes = FINGERPRINT) -> DiskStore:
        stores.append(DiskStore(SegmentFolder(folder, limit_bytes), fingerprint))
        await_index(stores[-1])
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block gets a segment of its own, and other processes' segments are looked for on each look-up."""
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(disk_store, "RESCAN_S", 0.0)


def write(store: DiskStore, numbers: range, nbytes: int = 100) -> None:
    """Put blocks, each after the last is written."""
    for number in numbers:
        before = store.counters()["disk"].num_stored
        store.put(HASHES[number], content(number, nbytes))
        wait_until(lambda before=before: store.counters()["disk"].num_stored > before)  # type: ignore[misc]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.blocks"))


def test_blocks_are_found_after_a_restart(opened: Open, folder: Path) -> None:
    store = opened()
    for number, block_hash in enumerate(HASHES):
        assert store.wants(block_hash, (0, 3))
        store.put(block_hash, content(number))
        assert not store.wants(block_hash, (0, 3))
    assert store.find(HASHES).num_blocks == len(HASHES)  # also before they are written
    store.close()
    assert len(segments(folder)) == 1
    again = opened()
    found = again.find([*HASHES, b"?" * 32])
    assert found.num_blocks == len(HASHES)
    assert found.seconds > 0
    arrived = fetched(again, HASHES)
    assert [name for name, _ in arrived] == HASHES
    for number, (_, got) in enumerate(arrived):
        assert {group: bytes(part) for group, part in got.items()} == content(number)


def test_blocks_that_wait_to_be_written_are_fetched(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that the engine calls waits for a file."""
    writing, go_on = threading.Event(), threading.Event()

    def blocked(*_: object) -> tuple[str, list[str]]:
        writing.set()
        assert go_on.wait(60)
        raise OSError(errno.EIO, "no such luck")

    monkeypatch.setattr(SegmentFolder, "write", blocked)
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 1)
    store = opened()
    store.put(HASHES[0], content(0))
    assert writing.wait(60)
    store.put(HASHES[1], content(1))
    assert fetched(store, HASHES[:3]) == [(HASHES[0], content(0)), (HASHES[1], content(1))]
    go_on.set()


def test_only_leading_blocks_are_found(opened: Open) -> None:
    store = opened()
    for number in (0, 1, 3):
        store.put(HASHES[number], content(number))
    assert store.find(HASHES).num_blocks == 2
    assert [name for name, _ in fetched(store, HASHES)] == HASHES[:2]
    assert store.find(HASHES[2:]).num_blocks == 0


@pytest.mark.usefixtures("at_once")
def test_another_fingerprint_finds_nothing(opened: Open) -> None:
    write(opened(), range(3))
    assert opened(fingerprint=sha256(b"other").digest()).find(HASHES).num_blocks == 0


@pytest.mark.usefixtures("at_once")
def test_what_was_used_least_recently_is_removed(opened: Open, folder: Path) -> None:
    """Also what was used before a restart, and what belongs to another model."""
    other = opened(fingerprint=sha256(b"other").digest())
    write(other, range(10, 11), 1000)
    write(opened(), range(3), 1000)
    for age, path in zip(
        (4, 3, 2, 1), sorted(segments(folder), key=lambda path: path.stat().st_mtime), strict=True
    ):
        os.utime(path, (1e9 - age, 1e9 - age))
    store = opened(limit_bytes=5000)
    assert store.find(HASHES[:1]).num_blocks == 1  # now the one of block 1 is the oldest of this model
    wait_until(lambda: min(path.stat().st_mtime for path in segments(folder)) > 0 and _touched(folder) == 1)
    write(store, range(3, 5), 1000)
    assert [store.find([HASHES[number]]).num_blocks for number in range(5)] == [1, 0, 1, 1, 1]
    assert sum(path.stat().st_size for path in segments(folder)) <= 5000
    assert store.counters()["disk"].num_evicted == 1  # and one that was not its own


def _touched(folder: Path) -> int:
    return sum(path.stat().st_mtime > 1e9 for path in segments(folder))


@pytest.mark.usefixtures("at_once")
def test_stores_share_a_folder(opened: Open) -> None:
    first, second = opened(), opened()
    write(first, range(3))
    wait_until(lambda: second.find(HASHES).num_blocks == 3)
    write(second, range(3, 6))
    wait_until(lambda: first.find(HASHES).num_blocks == 6)
    assert len(fetched(first, HASHES)) == 6
    assert len(fetched(second, HASHES)) == 6


@pytest.mark.usefixtures("at_once")
def test_what_another_process_removed_is_absent(opened: Open, folder: Path) -> None:
    store = opened()
    write(store, range(6))
    fetch = store.find(HASHES)
    assert fetch.num_blocks == 6
    for path in segments(folder):
        path.unlink()
    assert fetched(store, HASHES) == []
    assert store.counters()["disk"].num_damaged == 0


def test_a_segment_that_could_not_be_read_once_is_found_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    store, other = opened(), opened()
    write(store, range(3))
    with monkeypatch.context() as patched:
        patched.setattr(SegmentFolder, "open", failing(OSError(errno.EMFILE, "too many open files")))
        assert fetched(store, HASHES[:3]) == []
    write(other, range(5, 6))  # the folder changes
    wait_until(lambda: store.find(HASHES[:3]).num_blocks == 3)
    assert len(fetched(store, HASHES[:3])) == 3


def failing(error: Exception) -> Callable[..., int]:
    """Return a function that fails."""

    def fail(*_: object) -> int:
        raise error

    return fail


def test_small_segments_are_joined(opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "FLUSH_S", 0.0)
    store = opened()
    write(store, range(20))
    assert len(segments(folder)) == 1
    assert len(fetched(store, HASHES)) == 20


@pytest.mark.usefixtures("at_once")
def test_a_content_with_more_groups_takes_the_place_of_one_with_fewer(opened: Open) -> None:
    store = opened()
    more = {**content(0), 5: b"a snapshot of a state"}
    for some in (content(0), more, content(0)):
        assert store.wants(HASHES[0], more) == (store.counters()["disk"].num_stored < 2)
        before = store.counters()["disk"].num_stored
        store.put(HASHES[0], some)
        wait_until(lambda before=before: store.counters()["disk"].num_stored > before)  # type: ignore[misc]
    for one in (store, opened()):
        ((_, got),) = fetched(one, HASHES[:1])
        assert {group: bytes(part) for group, part in got.items()} == more


def test_files_are_for_their_owner_alone(opened: Open, folder: Path) -> None:
    store = opened()
    store.put(HASHES[0], content(0))
    store.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in segments(folder)] == [0o600]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="may be written"):
        SegmentFolder(folder, LIMIT)


def test_a_secret_stays(folder: Path) -> None:
    secret = folder_secret(folder)
    assert len(secret) == 32
    assert folder_secret(folder) == secret
    assert folder_secret(folder.with_name("other")) != secret
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        folder_secret(folder)
    (folder / "secret").unlink()
    (folder / "secret").mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        folder_secret(folder)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        SegmentFolder(tmp_path / "file", LIMIT)


@pytest.mark.usefixtures("at_once")
def test_a_full_disk_is_reported_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> tuple[str, list[str]]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = opened()
    write(store, range(1))
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(SegmentFolder, "write", full)
        patched.setattr(disk_store, "RETRY_S", 0.0)
        for number in range(1, 6):
            store.put(HASHES[number], content(number))
            wait_until(lambda number=number: store.counters()["disk"].num_declined >= number)  # type: ignore[misc]
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert not store.wants(HASHES[7], (0, 3))  # for a while
    assert len(fetched(store, HASHES)) == 1  # what is there serves on
    monkeypatch.setattr(disk_store, "RETRY_S", 0.0)
    write(store, range(1, 3))
    assert len(fetched(store, HASHES)) == 3


@pytest.mark.usefixtures("at_once")
def test_a_folder_that_vanished_is_made_again(opened: Open, folder: Path) -> None:
    store = opened()
    write(store, range(3))
    shutil.rmtree(folder)
    assert fetched(store, HASHES) == []
    write(store, range(3))
    assert len(fetched(store, HASHES)) == 3
    assert folder.stat().st_mode & 0o777 == 0o700


def test_too_much_at_once_is_declined(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "WAITING_BYTES", 1000)
    store = opened()
    for number, block_hash in enumerate(HASHES):
        if store.wants(block_hash, (0, 3)):
            store.put(block_hash, content(number))
    assert store.find(HASHES).num_blocks == 10
    store.put(HASHES[10], content(10))
    assert store.counters()["disk"].num_declined == 1


@pytest.mark.usefixtures("at_once")
def test_the_index_is_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    write(opened(), range(6))
    monkeypatch.setattr(segment_index, "MAX_INDEXED", 4)
    store = opened()
    assert [store.find([name]).num_blocks for name in HASHES[:6]] == [0, 0, 1, 1, 1, 1]
    write(store, range(6, 8))
    assert [store.find([name]).num_blocks for name in HASHES[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_damaged_segments_give_nothing_wrong(seed: int) -> None:
    num_blocks, num_right = check_folder(seed, 100)
    assert 0 < num_right < num_blocks


# In memory


def test_memory_keeps_what_was_used_last() -> None:
    store = MemoryStore(400)
    for number in range(3):
        store.put(HASHES[number], content(number))
    assert len(fetched(store, HASHES[:1])) == 1
    store.put(HASHES[3], content(3))
    assert [store.find([name]).num_blocks for name in HASHES[:4]] == [1, 0, 1, 1]
    store.put(HASHES[4], content(4, 1000))  # larger than all of it
    counters = store.counters()["memory"]
    assert counters.num_bytes == sum(map(len, content(0).values())) * 3
    assert (counters.num_blocks, counters.num_stored, counters.num_evicted) == (3, 4, 1)


def test_memory_keeps_the_groups_that_it_has() -> None:
    store, more = MemoryStore(400), {**content(0), 5: b"a snapshot of a state"}
    for some in (content(0), {5: more[5]}, content(0)):
        store.put(HASHES[0], some)
    ((_, got),) = fetched(store, HASHES[:1])
    assert got == more
    assert store.counters()["memory"].num_bytes == sum(map(len, more.values()))


def test_memory_and_disk_together(opened: Open) -> None:
    disk = opened()
    for number in range(6):
        disk.put(HASHES[number], content(number))
    store = MemoryStore(LIMIT, disk)
    for number in (0, 3, 6):
        store.put(HASHES[number], content(number))
    assert store.find(HASHES).num_blocks == 7
    assert [name for name, _ in fetched(store, HASHES)] == HASHES[:7]
    assert not store.wants(HASHES[3], (0, 3))
    assert store.wants(HASHES[7], (0, 3))
    assert disk.find(HASHES).num_blocks == 7
    assert store.find(HASHES[8:]).num_blocks == 0


# Prediction


def test_a_slower_disk_is_believed_at_once_and_a_faster_one_slowly() -> None:
    pace = Pace()
    pace.learn(100, 50_000_000, 0.5)
    assert pace.predict(100, 50_000_000) == pytest.approx(0.5)
    pace.learn(100, 50_000_000, 2.0)
    assert pace.predict(100, 50_000_000) == pytest.approx(2.0)
    pace.learn(100, 50_000_000, 0.5)
    assert 1.0 < pace.predict(100, 50_000_000) < 2.0


@pytest.mark.usefixtures("at_once")
def test_the_disk_is_measured_before_the_first_fetch(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    write(opened(), range(4))
    assumed_s = opened().find(HASHES).seconds
    slow = segment_index.read_frames

    def slowly(*args: object) -> Iterator[memoryview]:
        threading.Event().wait(0.2)
        yield from slow(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(segment_index, "read_frames", slowly)
    store = opened()
    wait_until(lambda: store.find(HASHES).seconds > 10 * assumed_s)


def test_reads_are_small_at_first_so_that_something_arrives_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "FIRST_BYTES", 20)
    monkeypatch.setattr(segment, "READ_BYTES", 60)
    content = bytes(range(200))
    (tmp_path / "file").write_bytes(content)
    sizes: list[int] = []
    read = segment._read
    monkeypatch.setattr(segment, "_read", lambda *args: sizes.append(args[2]) or read(*args))
    places = [segment.BlockPlace(offset, 10, 1) for offset in range(0, 200, 10)]
    with (tmp_path / "file").open("rb") as file:
        assert b"".join(segment.read_frames(file.fileno(), places)) == content
    assert sizes == [20, 40, 60, 60, 20]
