"""Waiting for stores of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.block_store import BlockContent, BlockStore
from quire.transfer.disk_store import DiskStore

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something holds. Raises AssertionError after a long time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happens"
        time.sleep(0.0002)


def await_index(store: DiskStore) -> None:
    """Wait until the segments that were there at the start are indexed."""
    wait_until(lambda: store.ready)


def fetched(store: BlockStore, hashes: Sequence[bytes]) -> list[tuple[bytes, BlockContent]]:
    """Fetch blocks, and wait for them."""
    fetch = store.fetch(hashes)
    wait_until(lambda: fetch.done)
    return fetch.take()
