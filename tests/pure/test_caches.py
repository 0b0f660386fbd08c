"""Groups of layers: windows that slide, snapshots of states, and prefixes that all groups have kept."""

from __future__ import annotations

import pytest
from fake_runner import Received
from test_engine import ask
from test_scheduler import Run, crowd, shape
from test_steps_in_flight import Ahead

from quire.engine.blocks import BlockPool
from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import request_limits, validate
from quire.errors import RequestError

WHOLE, WINDOW = BlockGroup(64), BlockGroup(64, window=8)


def held(run: Run, name: str) -> list[int]:
    """Blocks that the first sequence of a request holds, by group."""
    return [len(table.blocks) for table in run.scheduler._requests[name].sequences[0].tables]


def findable(run: Run, group: int) -> int:
    pools = {one.index: one.pool for one in (*run.scheduler.caches.paged, *run.scheduler.caches.states)}
    return len(pools[group]._block_of)


# Windows


def test_a_windowed_group_holds_no_more_than_can_be_seen():
    run = Run(groups=[WHOLE, WINDOW], max_num_batched_tokens=8)
    run.add("a", 24, max_tokens=30, ignore_eos=True)
    most = []
    while run.scheduler.has_work:
        run.step()
        if "a" in run.scheduler:
            most.append(held(run, "a"))
    assert max(blocks for _, blocks in most) == WINDOW.num_held(54, 4, 8) == 5
    assert {blocks for _, blocks in most[5:]} == {3}  # what a position sees, and a block
    assert max(blocks for blocks, _ in most) == 13
    run.finish()


def test_more_requests_fit_when_windows_give_back_what_slid_out():
    counts = []
    for groups in ([BlockGroup(100), BlockGroup(18)], [BlockGroup(100), BlockGroup(18, window=4)]):
        run = Run(groups=groups, max_num_batched_tokens=16, num_spare_blocks=0)
        for name in "abcdef":
            run.add(name, [ord(name)] * 32, max_tokens=24, ignore_eos=True)
        most = 0
        while run.scheduler.has_work:
            run.step()
            most = max(most, run.scheduler.num_running)
        counts.append((most, run.scheduler.num_preemptions))
        run.finish()
    assert counts == [(2, 5), (6, 0)]  # of each: those that ran at once, and preemptions


def test_a_grant_says_where_its_blocks_go():
    run = Run(groups=[WHOLE, WINDOW], max_num_batched_tokens=8)
    run.add("a", 24, max_tokens=6, ignore_eos=True)
    first, _ = run.step()
    assert [(g.group, g.first, len(g.block_ids)) for g in first.granted] == [(0, 0, 6), (1, 0, 5)]
    run.step()
    third, _ = run.step()
    assert [(g.group, g.first, len(g.block_ids)) for g in third.granted] == [(1, 5, 1)]
    run.finish()


def test_a_hit_shares_only_the_tail_that_a_window_sees():
    run = Run(groups=[WHOLE, WINDOW])
    run.add("a", 24, max_tokens=1)
    run.step()
    run.add("b", 24, max_tokens=1)
    step, _ = run.step()
    assert shape(step) == [(0, 20, 4, True)]
    (_, _, _, whole), (_, group, first, tail) = step.granted
    assert (len(whole), group, first, len(tail)) == (6, 1, 3, 3)  # position 20 sees 13 ... 20
    run.finish()


def test_what_slid_out_of_a_window_stays_findable_until_it_is_reused():
    run = Run(groups=[WHOLE, WINDOW], max_num_batched_tokens=4)
    run.add("long", 32, max_tokens=1)
    run.finish()
    assert findable(run, 1) == 8
    run.add("short", 13, max_tokens=1)
    assert shape(run.step()[0]) == [(0, 12, 1, True)]
    run.finish()


def test_a_hit_ends_where_every_window_still_has_its_tail():
    run = Run(groups=[WHOLE, WINDOW], max_num_batched_tokens=64)
    run.add("a", 24, max_tokens=1)
    run.finish()
    pool, chain = run.scheduler.caches.paged[1].pool, []
    run.add("b", 24, max_tokens=1)
    sequence = run.scheduler._requests["b"].sequences[0]
    chain = [sequence.block_hash(index, 4) for index in range(6)]
    pool._forget(pool.find(chain[3]))
    assert shape(run.step()[0]) == [(0, 12, 12, True)]  # blocks 1 and 2 are there for position 12
    run.finish()


@pytest.mark.parametrize("missing", range(8))
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 40])
def test_the_longest_beginning_is_found_whatever_is_missing(window, missing):
    run = Run(groups=[WHOLE, BlockGroup(64, window)], max_num_batched_tokens=64)
    run.add("a", 33, max_tokens=1)
    run.finish()
    run.add("b", 33, max_tokens=1)
    sequence = run.scheduler._requests["b"].sequences[0]
    chain = [sequence.block_hash(index, 4) for index in range(8)]
    pool = run.scheduler.caches.paged[1].pool
    pool._forget(pool.find(chain[missing]))

    def usable(count: int) -> bool:
        seen = range(max(0, 4 * count - window + 1) // 4, count)
        return all(pool.find(chain[index]) is not None for index in seen)

    longest = max(count for count in range(9) if usable(count))
    assert run.step()[0].rows[0].start == 4 * longest
    run.finish()


def test_a_match_looks_at_each_block_of_a_group_once_or_twice(monkeypatch):
    run = Run(groups=[WHOLE, WINDOW, BlockGroup(64, 3)], max_num_batched_tokens=256, max_model_len=300)
    run.add("a", 200, max_tokens=1)
    run.finish()
    run.add("b", 200, max_tokens=1)
    looks, find = [], BlockPool.find
    monkeypatch.setattr(BlockPool, "find", lambda pool, h: looks.append(h) or find(pool, h))
    run.scheduler.caches.match(run.scheduler._requests["b"].sequences[0])
    assert len(looks) <= 2 * 3 * 50


def test_admission_waits_for_room_in_every_group():
    run = Run(groups=[WHOLE, BlockGroup(7, window=8)], max_num_batched_tokens=8)
    run.add("a", [1] * 20, max_tokens=2, ignore_eos=True)
    run.add("b", [2] * 20, max_tokens=2, ignore_eos=True)
    step, _ = run.step()
    assert [a.request_id for a in step.admitted] == ["a"]
    run.finish()
    assert run.scheduler.num_preemptions == 0


def test_a_preemption_frees_all_groups():
    run = Run(groups=[BlockGroup(64), BlockGroup(6)], num_spare_blocks=0, enable_prefix_caching=False)
    run.add("old", [1] * 7, max_tokens=12, ignore_eos=True)
    run.add("young", [2] * 7, max_tokens=12, ignore_eos=True)
    while not run.scheduler.num_preemptions:
        run.step()
    assert run.scheduler.num_free_blocks == 70 - 2 * sum(held(run, "old")) // 2
    run.finish()


def test_a_lone_request_runs_in_the_least_room_that_a_window_needs():
    for max_steps_in_flight in (1, 2):
        window = BlockGroup(BlockGroup(1, 8).num_held(60, 4, 8), 8)
        run = Ahead(groups=[WHOLE, window], max_num_batched_tokens=8, max_steps_in_flight=max_steps_in_flight)
        run.add("a", 40, max_tokens=20, ignore_eos=True)
        run.finish()
        assert run.scheduler.num_preemptions == 0


def test_what_can_never_fit_a_group_is_refused():
    run = Run(groups=[WHOLE, BlockGroup(4, window=8)], max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="room for 16 tokens"):
        validate(ask("a", [1] * 20, max_tokens=4), run.scheduler)
    validate(ask("a", [1] * 10, max_tokens=4), run.scheduler)
    limits = request_limits(run.scheduler, None)
    assert limits.num_blocks == run.scheduler.caches.num_blocks == 68


def test_a_head_is_matched_again_when_the_tail_of_its_window_was_cached_since():
    run = Run(groups=[WHOLE, BlockGroup(10, window=8)])
    run.add("past", 24, max_tokens=1)
    run.finish()
    pool = run.scheduler.caches.paged[1].pool
    for block in range(10):
        pool._forget(block)
    run.add("a", 24, max_tokens=9, ignore_eos=True)
    run.add("b", 27, max_tokens=1)
    first, _ = run.step()
    assert [a.request_id for a in first.admitted] == ["a"]  # six of ten blocks; "b" wants seven
    second, _ = run.step()
    assert [a.request_id for a in second.admitted] == ["b"]
    assert second.rows[-1].start == 24
    run.finish()


# States


def states(num_snapshots=8, every=100) -> list:
    return [WHOLE, StateGroup(num_snapshots, every)]


def test_a_state_is_saved_where_the_prompt_can_be_gone_on_with():
    run = Run(groups=states())
    run.add("a", 22, max_tokens=1)
    step, _ = run.step()
    assert [(s.slot, s.group, s.position) for s in step.saved] == [(0, 1, 20)]
    run.add("b", 22, max_tokens=1)
    step, _ = run.step()
    assert shape(step) == [(0, 20, 2, True)]
    assert [(s.slot, s.group, s.position) for s in step.restored] == [(0, 1, 20)]
    assert step.saved == ()  # it is kept already
    run.finish()


def test_the_last_token_of_a_prompt_is_left_to_compute():
    run = Run(groups=states())
    run.add("a", 24, max_tokens=1)
    assert [s.position for s in run.step()[0].saved] == [20]
    run.add("b", 24, max_tokens=1)
    assert run.step()[0].rows[0].start == 20
    run.finish()


def test_states_are_saved_at_every_nth_border_within_rows_of_any_length():
    run = Run(groups=states(every=2), max_num_batched_tokens=13)
    run.add("a", 30, max_tokens=12, ignore_eos=True)
    saved = []
    while run.scheduler.has_work:
        saved.append([s.position for s in run.step()[0].saved])
    assert saved[:3] == [[8], [16, 24], [28]]
    assert [position for one in saved[3:] for position in one] == [32, 40]
    run.finish()


def test_a_hit_goes_back_to_the_last_state_that_is_kept():
    run = Run(groups=states(every=2))
    run.add("a", 30, max_tokens=1)
    run.finish()
    run.add("b", [*range(21), 50, 51, 52, 53], max_tokens=1)  # five blocks are equal
    assert run.step()[0].rows[0].start == 16
    run.finish()


def test_without_a_state_nothing_is_taken_from_the_cache():
    run = Run(groups=states(num_snapshots=0))
    run.add("a", 22, max_tokens=1)
    run.finish()
    run.add("b", 22, max_tokens=1)
    assert run.step()[0].rows[0].start == 0
    run.finish()


def test_the_snapshot_that_was_used_least_recently_is_evicted():
    run = Run(groups=states(num_snapshots=2))
    for name, token_id in (("a", 1), ("b", 2), ("a2", 1), ("c", 3)):
        run.add(name, [token_id] * 10, max_tokens=1)
        run.finish()
    for name, token_id, start in (("a3", 1, 8), ("c2", 3, 8), ("b2", 2, 0)):
        run.add(name, [token_id] * 10, max_tokens=1)
        assert run.step()[0].rows[0].start == start, name
    run.finish()


def test_every_group_of_states_must_have_one():
    run = Run(groups=[WHOLE, StateGroup(8, 2), StateGroup(8, 3)], max_num_batched_tokens=64)
    run.add("a", 45, max_tokens=1)
    run.finish()
    run.add("b", [*range(37), *range(60, 70)], max_tokens=1)  # nine equal blocks; both have the sixth
    step, _ = run.step()
    assert step.rows[0].start == 24
    assert [s.group for s in step.restored] == [1, 2]
    run.finish()


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_go_on_from_the_state_of_their_prompt(caching):
    run = Run(groups=states(), enable_prefix_caching=caching)
    run.add("a", 22, n=3, max_tokens=2, ignore_eos=True)
    run.step()
    step, _ = run.step()
    assert [row.start for row in step.rows] == [22, 20, 20]
    run.finish()


def test_no_state_is_kept_that_nobody_could_find():
    run = Run(groups=states(every=1), enable_prefix_caching=False)
    run.add("a", 22, max_tokens=4)
    assert run.step()[0].saved == ()
    run.finish()


def test_a_preempted_sequence_goes_on_from_a_state():
    run = Run(groups=[BlockGroup(7), StateGroup(8, 2)], num_spare_blocks=0)
    run.add("old", [1] * 7, max_tokens=12, ignore_eos=True)
    run.add("young", [2] * 7, max_tokens=12, ignore_eos=True)
    while run.scheduler.num_preemptions == 0:
        run.step()
    while not (step := run.step()[0]).admitted:
        pass
    assert step.restored[0].position == step.rows[-1].start > 0
    run.finish()


def test_a_state_is_findable_only_when_its_step_was_committed():
    run = Ahead(groups=states(), max_num_batched_tokens=8)
    run.add("a", 14, max_tokens=1)
    run.plan()
    assert [s.position for s in run.plan().saved] == [12]
    run.collect()
    assert findable(run, 1) == 0
    run.collect()
    assert findable(run, 1) == 1
    run.finish()


def test_the_state_of_an_aborted_row_is_given_back():
    run = Ahead(groups=states(num_snapshots=1))
    run.add("a", 14, max_tokens=9)
    run.plan()
    run.abort("a")
    run.collect()
    assert findable(run, 1) == 0
    run.add("b", [5] * 14, max_tokens=1)
    assert len(run.plan().saved) == 1
    run.finish()


# All at once


MODELS = {
    "windows": [BlockGroup(40), BlockGroup(24, 6), BlockGroup(30, 15)],
    "states": [BlockGroup(40), StateGroup(6, 3)],
    "all": [StateGroup(9, 2), BlockGroup(30, 7), BlockGroup(40)],
}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_crowd_gets_what_each_would_get_alone(model, max_steps_in_flight):
    made = Ahead(
        groups=MODELS[model],
        num_spare_blocks=0,
        max_num_seqs=12,
        max_num_batched_tokens=40,
        max_steps_in_flight=max_steps_in_flight,
    )
    run = crowd(run=made)
    run.finish()
    assert run.scheduler.num_preemptions > 10
    assert run.scheduler.num_cached_tokens > 500


def test_received_compares_with_the_groups_of_the_model():
    """A control: what a model with a window gives is not what one without gives."""
    run = Run(groups=[WINDOW])
    new = run.add("a", 20, max_tokens=4, ignore_eos=True)
    run.finish()
    other = Received([WHOLE])
    other.token_ids, other.logprobs, other.final = (
        run.received.token_ids,
        run.received.logprobs,
        run.received.final,
    )
    with pytest.raises(AssertionError, match="tokens differ"):
        other.verify(new, 0, 64)
