"""Contents of blocks copied out of one engine and into another: the same bits, in all formats of caches."""

from __future__ import annotations

from typing import Any

import pytest
import test_engine_caches
from fake_store import FakeStore
from test_engine_caches import PARAMS, PROMPTS, Answer, each_alone, make, mixed, run

from quire.backends.backend import Backend, Capacity
from quire.engine.engine import Engine
from quire.engine.request import prompt_hashes
from quire.types import NewRequest

Contents = dict[bytes, dict[int, bytes]]


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    return each_alone()


def contents_of(engine: Engine) -> Contents:
    """All blocks and snapshots that can be found, by hash and group."""
    found: Contents = {}
    for group in (*engine.scheduler.caches.paged, *engine.scheduler.caches.states):
        hashes = list(group.pool.findable())
        blocks = [group.pool.find(block_hash) for block_hash in hashes]
        for block_hash, content in zip(hashes, engine.runner.read_blocks(group.index, blocks), strict=True):
            found.setdefault(block_hash, {})[group.index] = content
    return found


def load(engine: Engine, contents: Contents, chosen: range = range(4), first: int = 0) -> int:
    """Load what there is of the prompts; return the number of blocks written."""
    num_written = 0
    for i in chosen:
        new = NewRequest(str(i), tuple(PROMPTS[i]), PARAMS[i])
        offered = [contents.get(one, {}) for one in prompt_hashes(new, 16)][first:]
        for group, block, index in engine.scheduler.load(new, first, offered):
            engine.runner.write_blocks(group, [block], [memoryview(offered[index - first][group])])
            num_written += 1
    return num_written


def new(**limits: Any) -> Engine:
    return make(mixed(), every=1, **limits)


def test_same_bits_with_loaded_blocks(alone: dict[int, Answer]) -> None:
    engine = new()
    assert run(engine) == alone
    other = new(max_num_batched_tokens=50)
    assert load(other, contents_of(engine)) > 20
    assert run(other) == alone
    assert other.scheduler.num_cached_tokens >= 3 * 96
    again = new()
    assert load(again, contents_of(other)) > 20
    assert run(again) == alone


def with_store(store: FakeStore, **limits: Any) -> Engine:
    """An engine that keeps blocks in a store, and finds them there."""
    engine = new(**limits)
    return Engine(engine.scheduler, engine.runner, blocks=engine.runner, store=store)


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 50, "max_steps_in_flight": 2}])
def test_same_bits_from_a_store(alone: dict[int, Answer], limits: dict[str, Any]) -> None:
    """Kept by one engine, one request at a time, and fetched by others: together, and in caches too small."""
    store = FakeStore()
    for i in range(4):
        assert run(with_store(store, **limits), range(i, i + 1)) == {i: alone[i]}
    num_put = store.num_put
    engine = with_store(store, **limits)
    assert run(engine) == alone
    assert sum(record.num_loaded_tokens for record in engine.records) >= 208
    assert sum(record.num_cached_tokens for record in engine.records) >= 3 * 96
    tight = {"num_blocks": 22, "num_windowed": 10, "num_snapshots": 3, "max_num_seqs": 2}
    small = with_store(store, **{"max_num_batched_tokens": 64, **limits, **tight})
    assert run(small) == alone
    assert store.num_put < num_put + 20


def test_what_is_there_is_not_loaded_again(alone: dict[int, Answer]) -> None:
    engine = new()
    run(engine, range(1))
    contents = contents_of(engine)
    assert load(engine, contents, range(1)) == 0
    other = new()
    assert load(other, contents, range(1)) > 0
    assert load(other, contents, range(1)) == 0
    assert run(other) == alone


def test_wrong_contents_are_noticed(alone: dict[int, Answer]) -> None:
    """The negative control: contents do decide the bits, in each group of caches."""
    engine = new()
    run(engine)
    contents = contents_of(engine)
    groups = range(len(engine.scheduler.caches.groups))
    assert len(groups) == 13
    for group in groups:
        wrong = {
            one: {g: bytes(len(c)) if g == group else c for g, c in own.items()}
            for one, own in contents.items()
        }
        other = new()
        load(other, wrong)
        assert run(other) != alone, group


def test_a_content_of_another_size_is_refused() -> None:
    engine = new()
    (content,) = engine.runner.read_blocks(2, [3])
    with pytest.raises(ValueError, match=rf"has {len(content)} bytes, not {len(content) - 1}"):
        engine.runner.write_blocks(2, [3], [content[:-1]])


def test_layouts_differ_where_contents_do() -> None:
    def layout(block_size: int = 16, kv_dtype: str = "float32") -> str:
        program = mixed()
        capacity = Capacity([9] * len(program.cache_groups), block_size, kv_dtype, 2)
        backend: Backend = test_engine_caches.new_backend(program, capacity)
        return backend.block_layout()

    assert layout() == layout()
    assert len({layout(), layout(8), layout(32)}) == 3
