"""Folders of damaged, truncated, swapped and foreign segments, and a store that has to live with them.

By hand, for more of them than the suite tries: python tests/model/damaged_segments.py 100000
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from stores import await_index, fetched

from quire.block_store import BlockContent
from quire.transfer.content import encode
from quire.transfer.disk_store import DiskStore
from quire.transfer.segment import EncodedBlock, segment_parts
from quire.transfer.segment_folder import SegmentFolder, prefix_of

FINGERPRINT, FOREIGN = sha256(b"this model").digest(), sha256(b"another model").digest()
Frames = list[tuple[bytes, bytes | bytearray]]


class Case:
    """One segment: the chain of its blocks, and the contents that are right."""

    def __init__(self, draw: random.Random, number: int) -> None:
        self.number = number
        self.name = f"{prefix_of(FINGERPRINT)}-{number:016x}.blocks"
        self.hashes = [sha256(f"{number} {i}".encode()).digest() for i in range(draw.randint(1, 6))]
        self.contents = {name: _content(draw) for name in self.hashes}

    def frames(self, fingerprint: bytes = FINGERPRINT) -> Frames:
        """Return the encoded blocks."""
        return [(name, encode(fingerprint, name, content)) for name, content in self.contents.items()]

    def write(self, folder: Path, fingerprint: bytes = FINGERPRINT, frames: Frames | None = None) -> None:
        """Write the segment, whole or with other blocks."""
        blocks = self.frames(fingerprint) if frames is None else frames
        parts = segment_parts(fingerprint, [EncodedBlock(name, 1, frame) for name, frame in blocks])
        (folder / self.name).write_bytes(b"".join(parts))


def _content(draw: random.Random) -> BlockContent:
    groups = sorted(draw.sample(range(6), draw.randint(1, 3)))
    return {group: draw.randbytes(draw.choice((0, 1, 8, 96, 640))) for group in groups}


Damage = Callable[[random.Random, Path, Case, Case], None]


def _flip(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    data = bytearray((folder / case.name).read_bytes())
    for _ in range(draw.choice((1, 1, 2, 9))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (folder / case.name).write_bytes(data)


def _overwrite(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    data = bytearray((folder / case.name).read_bytes())
    begin, count = draw.randrange(len(data)), draw.randint(1, 200)
    filler = draw.choice((bytes(count), b"\xff" * count, draw.randbytes(count)))
    data[begin : begin + count] = filler[: len(data) - begin]
    (folder / case.name).write_bytes(data)


def _truncate(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    os.truncate(folder / case.name, draw.randrange((folder / case.name).stat().st_size))


def _extend(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    with open(folder / case.name, "ab") as file:
        file.write(draw.randbytes(draw.randint(1, 300)))


def _cut_out(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    data = bytearray((folder / case.name).read_bytes())
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.randint(1, 100)]
    (folder / case.name).write_bytes(data)


def _swap_files(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    here, there = folder / case.name, folder / other.name
    if there.is_file():
        data = there.read_bytes()
        there.write_bytes(here.read_bytes())
        here.write_bytes(data)


def _foreign(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    case.write(folder, FOREIGN)


def _foreign_blocks(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    """A right table, over blocks of another model."""
    case.write(folder, FINGERPRINT, case.frames(FOREIGN))


def _other_blocks(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    """A right table, over right blocks of other tokens."""
    frames = draw.choices(other.frames() + case.frames(), k=len(case.hashes))
    case.write(folder, frames=[(name, frame) for name, (_, frame) in zip(case.hashes, frames, strict=True)])


def _shifted(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    """A right table with wrong lengths: blocks begin and end elsewhere."""
    data, cut = b"".join(frame for _, frame in case.frames()), draw.randint(1, 60)
    frames = [(name, bytearray(data[i * cut : (i + 1) * cut])) for i, name in enumerate(case.hashes)]
    case.write(folder, frames=frames)


def _empty(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).write_bytes(b"")


def _noise(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).write_bytes(draw.randbytes(draw.randint(1, 2000)))


def _pipe(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).unlink()
    os.mkfifo(folder / case.name)


def _link(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).unlink()
    target = draw.choice((folder / other.name, Path("/dev/zero"), folder, folder / "nothing"))
    (folder / case.name).symlink_to(target)


def _directory(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).unlink()
    (folder / case.name).mkdir()


def _gone(draw: random.Random, folder: Path, case: Case, other: Case) -> None:
    (folder / case.name).unlink()


DAMAGES: tuple[Damage, ...] = (
    *(_flip, _flip, _flip, _overwrite, _overwrite, _truncate, _truncate, _extend, _cut_out),
    *(_swap_files, _foreign, _foreign_blocks, _other_blocks, _shifted, _empty, _noise),
    *(_pipe, _link, _directory, _gone),
)


def check_folder(seed: int, num_cases: int) -> tuple[int, int]:
    """Damage the segments of a folder, before a store opens them or after. Return (blocks, blocks fetched).

    Raises AssertionError if a fetched block has another content than it had.
    """
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="quire-damaged-"))
    cases = [Case(draw, number) for number in range(num_cases)]
    try:
        for case in cases:
            case.write(folder)
        late = draw.random() < 0.5
        store = None
        if late:
            store = DiskStore(SegmentFolder(folder, 1 << 30), FINGERPRINT)
            await_index(store)
        for case in cases:
            if (folder / case.name).is_file() and not (folder / case.name).is_symlink():
                draw.choice(DAMAGES)(draw, folder, case, draw.choice(cases))
        if store is None:
            store = DiskStore(SegmentFolder(folder, 1 << 30), FINGERPRINT)
            await_index(store)
        num_right = sum(_check(store, case) for case in cases)
        store.close()
    finally:
        shutil.rmtree(folder)
    return sum(len(case.hashes) for case in cases), num_right


def _check(store: DiskStore, case: Case) -> int:
    found = store.find(case.hashes).num_blocks
    assert found <= len(case.hashes)
    arrived = fetched(store, case.hashes)
    for (block_hash, content), expected in zip(arrived, case.hashes, strict=False):
        assert block_hash == expected
        right = case.contents[block_hash]
        assert {group: bytes(part) for group, part in content.items()} == right, f"wrong bits: {case.number}"
    return len(arrived)


def main(num_files: int, in_folder: int = 100) -> None:
    """Damage so many files, a folder at a time, and print what was found."""
    began_s, blocks, right = time.monotonic(), 0, 0
    for seed in range(-(-num_files // in_folder)):
        num_blocks, num_right = check_folder(seed, in_folder)
        blocks, right = blocks + num_blocks, right + num_right
    spent_s = time.monotonic() - began_s
    print(
        f"{num_files:,} damaged segments of {blocks:,} blocks: {right:,} came back, 0 wrong; {spent_s:.0f} s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
