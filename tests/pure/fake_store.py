"""A store of blocks in memory, whose fetches arrive when a test says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.block_store import BlockContent, Found, StoreCounters


class FakeFetch:
    def __init__(self, contents: list[tuple[bytes, BlockContent]], num_arrived: int) -> None:
        self.contents = contents
        self.num_arrived = num_arrived
        self.num_taken = 0

    @property
    def done(self) -> bool:
        return self.num_arrived == len(self.contents)

    def arrive(self, count: int | None = None) -> None:
        self.num_arrived = len(self.contents) if count is None else min(count, len(self.contents))

    def take(self) -> list[tuple[bytes, BlockContent]]:
        assert not self.num_taken, "a fetch was ended twice"
        self.num_taken += 1
        return self.contents[: self.num_arrived]


class FakeStore:
    """`block_s` is the predicted time of a block; with `at_once` it arrives when it is asked for."""

    def __init__(self, block_s: float = 0.0, at_once: bool = True) -> None:
        self.kept: dict[bytes, BlockContent] = {}
        self.block_s = block_s
        self.at_once = at_once
        self.fetches: list[FakeFetch] = []
        self.num_put = 0
        self.full = self.busy = self.closed = False

    def find(self, hashes: Sequence[bytes]) -> Found:
        count = next((i for i, one in enumerate(hashes) if one not in self.kept), len(hashes))
        return Found(count, count * self.block_s)

    def fetch(self, hashes: Sequence[bytes]) -> FakeFetch:
        contents = [(one, self.kept[one]) for one in hashes if one in self.kept]
        self.fetches.append(FakeFetch(contents, len(contents) if self.at_once else 0))
        return self.fetches[-1]

    def wants(self, block_hash: bytes, groups: Collection[int]) -> bool:
        assert groups, "a block that is nowhere"
        return not self.full and not set(groups) <= self.kept.get(block_hash, {}).keys()

    def put(self, block_hash: bytes, content: BlockContent) -> None:
        assert self.kept.get(block_hash, {}).items() <= content.items(), "one hash, two contents"
        self.kept[block_hash] = content
        self.num_put += 1

    def counters(self) -> dict[str, StoreCounters]:
        return {"memory": StoreCounters(len(self.kept))}

    def close(self) -> None:
        self.closed = True
