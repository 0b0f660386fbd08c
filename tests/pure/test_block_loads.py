"""Which blocks are loaded, and what they may displace."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner

from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.request import prompt_hashes
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.types import BlockLoad, NewRequest

SIZE = 4


def make(*groups, num_spare_blocks: int = 1, **options) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 100} | options
    return Scheduler(groups=groups, block_size=SIZE, num_spare_blocks=num_spare_blocks, **limits)


def ask(name: str, first: int, count: int) -> NewRequest:
    return NewRequest(name, tuple(range(first, first + count)), SamplingParams(max_tokens=30))


def load(scheduler: Scheduler, new: NewRequest, *groups: int, first: int = 0) -> list[BlockLoad]:
    """Offer all blocks of a prompt, in these groups."""
    loads = scheduler.load(new, first, [groups] * (len(prompt_hashes(new, SIZE)) - first))
    scheduler.check()
    return loads


def run(scheduler: Scheduler, new: NewRequest, groups) -> None:
    """Add a request and compute its prompt."""
    scheduler.add(new)
    step = scheduler.schedule(0.0)
    scheduler.commit(step, FakeRunner(groups, SIZE).launch(step).result(), 1.0)


def test_the_leading_blocks_of_a_prompt() -> None:
    scheduler = make(BlockGroup(20))
    assert [(one.group, one.index) for one in load(scheduler, ask("a", 0, 17), 0)] == [
        (0, i) for i in range(4)
    ]
    assert len({one.block_id for one in load(scheduler, ask("b", 50, 17), 0)}) == 4
    assert load(scheduler, ask("a", 0, 17), 0) == []


def test_the_last_token_is_always_computed() -> None:
    assert len(load(make(BlockGroup(20)), ask("a", 0, 16), 0)) == 3


def test_blocks_after_a_hole_are_of_no_use() -> None:
    scheduler = make(BlockGroup(20))
    assert load(scheduler, ask("a", 0, 17), 0, first=1) == []
    assert [one.index for one in scheduler.load(ask("a", 0, 17), 0, [(0,), (0,), (), (0,)])] == [0, 1]
    assert [one.index for one in load(scheduler, ask("a", 0, 17), 0, first=1)] == [2, 3]


def test_blocks_that_running_sequences_will_need_are_left() -> None:
    groups = (BlockGroup(10),)
    scheduler = make(*groups, num_spare_blocks=3)
    run(scheduler, ask("running", 60, 9), groups)  # holds three of ten
    assert scheduler.num_free_blocks == 7
    assert [one.index for one in load(scheduler, ask("a", 0, 33), 0)] == [0, 1, 2, 3]
    assert load(scheduler, ask("b", 30, 29), 0, first=0) != []  # in place of those: the last used come last
    assert scheduler.num_free_blocks == 7


def test_what_is_loaded_does_not_displace_its_own_beginning() -> None:
    scheduler = make(BlockGroup(8))
    assert len(load(scheduler, ask("a", 0, 21), 0)) == 5
    longer = load(scheduler, ask("longer", 0, 60), 0)
    assert [one.index for one in longer] == [5, 6, 7]


def test_a_window_gets_what_is_visible() -> None:
    scheduler = make(BlockGroup(30), BlockGroup(8, 9))
    loads = load(scheduler, ask("a", 0, 41), 0, 1)
    assert [one.index for one in loads if one.group == 0] == list(range(10))
    assert [one.index for one in loads if one.group == 1] == [8, 9]


@pytest.mark.parametrize("partial", [BlockGroup(3, 9), StateGroup(1, 1)])
def test_without_room_in_a_group_nothing_is_loaded(partial) -> None:
    """Three blocks of a window, or one snapshot, of which running sequences may need as many."""
    groups = (BlockGroup(60), partial)
    scheduler = make(*groups, num_spare_blocks=2)
    run(scheduler, ask("running", 60, 5), groups)
    before = [pool.num_findable for _, pool in scheduler.caches.pools]
    assert load(scheduler, ask("a", 0, 41), 0, 1) == []
    assert [pool.num_findable for _, pool in scheduler.caches.pools] == before


def test_a_state_is_loaded_where_there_is_one() -> None:
    scheduler = make(StateGroup(4, 1), BlockGroup(30))
    new = ask("a", 0, 41)
    loads = scheduler.load(new, 0, [(1,), (0, 1), (1,), (0, 1), (1,)])
    assert sorted((one.group, one.index) for one in loads) == [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_loads_are_between_steps() -> None:
    scheduler = make(BlockGroup(20))
    scheduler.add(ask("a", 0, 9))
    scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="between steps"):
        scheduler.load(ask("b", 30, 9), 0, [(0,), (0,)])


def test_without_a_prefix_cache_nothing_is_loaded() -> None:
    assert load(make(BlockGroup(20), enable_prefix_caching=False), ask("a", 0, 17), 0) == []
