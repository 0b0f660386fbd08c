"""Parcels: contents arrive as they were sent, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from quire.transfer import parcels
from quire.transfer.brought_blocks import BroughtBlocks
from quire.transfer.parcels import (
    AnyParcel,
    InlineTransport,
    SharedParcel,
    SharedTransport,
    Transport,
    unpack,
)

MINE, OTHER = bytes(32), bytes(31) + b"\1"
CONTENTS = [(bytes([number]) * 32, {0: bytes([number]) * 1000, 2: b"state"}) for number in range(1, 6)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parcels, "_FOLDER", tmp_path)
    return tmp_path


def sent(transport: Transport) -> list[AnyParcel]:
    """Parcels as a message brings them to another process."""
    packed = [msgspec.msgpack.encode(one) for one in transport.pack(MINE, CONTENTS)]
    return [msgspec.msgpack.decode(one, type=AnyParcel) for one in packed]


def received(packed: list[AnyParcel], fingerprint: bytes = MINE) -> list[tuple[bytes, dict[int, bytes]]]:
    found = [pair for parcel in packed for pair in unpack(parcel, fingerprint)]
    return [(name, {group: bytes(part) for group, part in content.items()}) for name, content in found]


@pytest.mark.parametrize("transport", [InlineTransport(), SharedTransport()])
@pytest.mark.parametrize("nbytes", [1500, 1 << 20])
def test_contents_arrive(
    transport: Transport, nbytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "PARCEL_BYTES", nbytes)
    packed = sent(transport)
    assert len(packed) == (5 if nbytes == 1500 else 1)
    files = list(folder.iterdir())
    assert len(files) == (len(packed) if isinstance(transport, SharedTransport) else 0)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert received(packed) == CONTENTS
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("transport", [InlineTransport(), SharedTransport()])
def test_contents_of_another_checkpoint_are_not_taken(transport: Transport) -> None:
    assert received(sent(transport), OTHER) == []


def test_what_is_damaged_ends_a_parcel(folder: Path) -> None:
    packed = sent(SharedTransport())
    (path,) = folder.iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[2 * len(damaged) // 5 + 100] ^= 1  # within the third block
    path.write_bytes(damaged)
    assert received(packed) == CONTENTS[:2]


def test_a_name_is_not_a_path(folder: Path) -> None:
    (folder / "secret").write_bytes(b"secret")
    os.mkfifo(folder / f"quire-{'0' * 32}")
    (folder / f"quire-{'1' * 32}").symlink_to(folder / "secret")
    names = ("secret", "../secret", str(folder / "secret"), f"quire-{'0' * 32}", f"quire-{'1' * 32}", "")
    for name in names:
        assert received([SharedParcel([bytes(32)], name, [6])]) == []
        assert received([SharedParcel([bytes(32)], name, [7, -1])]) == []
    assert (folder / "secret").read_bytes() == b"secret"


def test_full_memory_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parcels.os, "write", full)
        packed = list(SharedTransport().pack(MINE, CONTENTS))
    assert list(folder.iterdir()) == []
    assert received(packed) == CONTENTS


def test_what_nobody_opened_is_removed(folder: Path) -> None:
    list(SharedTransport().pack(MINE, CONTENTS[:1]))
    (left,) = folder.iterdir()
    (folder / "quire-other").write_bytes(b"not ours")
    os.utime(left, (0, 0))
    os.utime(folder / "quire-other", (0, 0))
    list(SharedTransport().pack(MINE, CONTENTS[1:2]))
    assert not left.exists()
    assert (folder / "quire-other").exists()


def test_what_follows_a_damaged_parcel_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PARCEL_BYTES", 1500)
    packed = sent(SharedTransport())
    assert isinstance(packed[0], SharedParcel)
    (folder / packed[0].name).write_bytes(bytes(packed[0].num_bytes))
    brought = BroughtBlocks(MINE)
    for parcel in packed:
        brought.bring(parcel)
    assert brought.take() == []
    assert list(folder.iterdir()) == []
