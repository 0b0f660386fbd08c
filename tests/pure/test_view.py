"""Views of an engine: what they say of steps and blocks, when they are built, and that no plan changes."""

from __future__ import annotations

import itertools

import pytest
from fake_runner import FakeRunner, text
from test_engine import ask

from quire.engine import view
from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import Engine, step
from quire.engine.scheduler import Scheduler
from quire.engine.status import StepReport
from quire.engine.view import GroupView, StepView
from quire.types import Step

SIZE = 4  # tokens of a block
WHOLE = BlockGroup(64)


class Watched:
    """An engine with a clock that stands still, and all that its reports have shown."""

    def __init__(self, groups=(WHOLE,), *, watch=True, **limits) -> None:
        self.now = 0.0
        self.runner = FakeRunner(list(groups), SIZE)
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64} | limits
        scheduler = Scheduler(groups=groups, block_size=SIZE, **limits)
        self.engine = Engine(scheduler, self.runner, clock=lambda: self.now)
        self.steps: list[StepView] = []
        self.groups: list[list[GroupView]] = []
        self.launched: list[Step] = []
        launch = self.runner.launch
        self.runner.launch = lambda step: self.launched.append(step) or launch(step)  # type: ignore[method-assign]
        if watch:
            self.engine.watch(True)

    def step(self, after_s=1.0) -> StepReport | None:
        """Step once; return the report."""
        _, report = step(self.engine)
        self.now += after_s
        if report is not None and report.view is not None:
            self.steps += report.view.steps
            if report.view.groups is not None:
                self.groups.append(report.view.groups)
        return report

    def finish(self) -> None:
        """Step for as long as there is anything to do."""
        while self.engine.wait_s is not None:
            self.now += self.engine.wait_s
            self.step()


def recounted(groups: list[GroupView]) -> list[dict[int, int]]:
    """How many tables hold each block, by group."""
    found = []
    for group in groups:
        counts: dict[int, int] = {}
        for table in group.tables:
            for block in table.block_ids:
                counts[block] = counts.get(block, 0) + 1
        found.append(counts)
    return found


def check(groups: list[GroupView]) -> None:
    """The counters, the listed blocks and the tables of groups say the same."""
    for group, counts in zip(groups, recounted(groups), strict=True):
        assert {block: holders for block, holders, _ in group.held} == counts
        assert len(group.held) == group.num_blocks - group.num_free
        assert sum(found for _, _, found in group.held) + len(group.idle) == group.num_findable
        assert not counts.keys() & set(group.idle)


# Steps


def test_the_rows_of_a_request_are_its_prompt_in_chunks_and_its_tokens():
    run = Watched()
    run.engine.add(ask("a", prompt=range(20), max_tokens=3, ignore_eos=True))
    run.finish()
    assert [shown.rows for shown in run.steps] == [
        [(0, 0, 16, 20, 0, 0, 0, "a")],
        [(0, 16, 4, 20, 1, 0, 0, "a")],
        [(0, 20, 1, 20, 1, 0, 0, "a")],
        [(0, 21, 1, 20, 1, 0, 0, "a")],
    ]
    assert [shown.step_index for shown in run.steps] == [0, 1, 2, 3]


def test_rows_are_in_the_order_of_the_step_with_the_times_of_its_result():
    run = Watched(max_steps_in_flight=2)
    for name in "abc":
        run.engine.add(ask(name, prompt=[ord(name)] * 5, max_tokens=4, n=2, temperature=1, seed=1))
    run.finish()
    assert len(run.steps) == len(run.launched)
    for shown, planned in zip(run.steps, run.launched, strict=True):
        assert [row[:3] for row in shown.rows] == [row[:3] for row in planned.rows]
        assert [row[4] for row in shown.rows] == [row.num_logits for row in planned.rows]
        assert (shown.began_s, shown.ended_s) == (0.0, 0.0)  # of the fake runner
    assert {row[7] for shown in run.steps for row in shown.rows} == set("abc")


def test_drafted_and_accepted_tokens_are_counted():
    alone = Watched()
    alone.engine.add(ask("a", prompt=range(5), max_tokens=8, ignore_eos=True))
    tokens = []
    while alone.engine.has_work:
        tokens += [token for output in alone.engine.step() for token in output.token_ids]
    run = Watched()
    run.engine.add(ask("a", prompt=range(5), max_tokens=8, ignore_eos=True))
    run.engine.add(ask("b", prompt=[7], max_tokens=8, ignore_eos=True))
    run.step()
    run.engine.scheduler.draft("a", 0, text([*tokens[1:3], (tokens[3] + 1) % 23]))
    run.step()
    assert [row[4:7] for row in run.steps[-1].rows] == [(4, 3, 2), (1, 0, 0)]


# Blocks


def test_blocks_of_a_shared_beginning_have_two_holders_and_are_findable_afterwards():
    run = Watched()
    run.engine.add(ask("a", prompt=range(14), max_tokens=20, ignore_eos=True))
    run.step()
    run.engine.add(ask("b", prompt=[*range(12), 99], max_tokens=4, ignore_eos=True))
    run.step()
    ((group,),) = run.groups[-1:]
    check([group])
    assert [holders for _, holders, _ in group.held].count(2) == 3
    a, b = group.tables
    assert (a.request_id, b.request_id) == ("a", "b")
    assert a.block_ids[:3] == b.block_ids[:3]
    assert a.block_ids[3] != b.block_ids[3]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 12)
    assert (a.num_tokens, b.num_tokens) == (15, 13)
    assert group.held[0] == (a.block_ids[0], 2, 1)
    run.finish()
    ((group,),) = run.groups[-1:]
    check([group])
    assert (group.num_free, group.tables) == (64, [])
    assert set(group.idle) >= set(a.block_ids[:3])


def test_an_aborted_request_holds_nothing_in_the_next_view():
    run = Watched()
    run.engine.add(ask("a", prompt=range(14), max_tokens=20))
    run.step()
    assert run.groups[-1][0].tables
    run.engine.abort("a")
    report = run.step()
    assert report is not None
    assert report.record is None
    assert run.groups[-1][0].tables == []
    assert run.groups[-1][0].num_free == 64


def test_with_a_window_tables_begin_later():
    run = Watched([BlockGroup(64), BlockGroup(32, window=8), StateGroup(8, 2)])
    run.engine.add(ask("a", prompt=range(16), max_tokens=20, ignore_eos=True))
    for _ in range(12):
        run.step()
        check(run.groups[-1])
    whole, windowed = (group.tables[0] for group in run.groups[-1])
    assert (run.groups[-1][0].window, run.groups[-1][1].window) == (None, 8)
    assert whole.first == 0
    assert windowed.first == len(whole.block_ids) - len(windowed.block_ids) > 3
    assert whole.num_tokens == windowed.num_tokens == 27


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_counters_blocks_and_tables_agree_under_load(steps_in_flight):
    run = Watched([BlockGroup(14)], max_steps_in_flight=steps_in_flight, num_spare_blocks=0)
    for number in range(12):
        common = range(number % 3 * 4)
        run.engine.add(ask(str(number), prompt=[*common, number], max_tokens=9 + number, ignore_eos=True))
    while run.engine.has_work:
        run.step()
        check(run.groups[-1])
    assert run.engine.scheduler.num_preemptions > 0
    assert len(run.groups) == len(run.engine.records)


def test_what_is_listed_is_bounded(monkeypatch):
    monkeypatch.setattr(view, "MAX_BLOCKS", 6)
    monkeypatch.setattr(view, "MAX_TABLES", 1)
    monkeypatch.setattr(view, "MAX_TABLE_BLOCKS", 3)
    run = Watched()
    for name in "abc":
        run.engine.add(ask(name, prompt=[ord(name)] * 16, max_tokens=4, ignore_eos=True))
        run.step()
    ((group,),) = run.groups[-1:]
    assert (len(group.held), group.idle) == (6, [])
    assert [len(table.block_ids) for table in group.tables] == [3]
    assert group.num_blocks - group.num_free > 6
    run.finish()
    ((group,),) = run.groups[-1:]
    assert (group.held, len(group.idle)) == ([], 6)
    assert group.num_findable > 6


# When


def test_nothing_is_viewed_unless_somebody_watches(monkeypatch):
    def fail(*_):
        raise AssertionError("a view was built")

    for name in ("Views", "_view_step", "view_groups"):
        monkeypatch.setattr(view, name, fail)
    monkeypatch.setattr("quire.engine.engine.Views", fail)
    run = Watched(watch=False)
    assert run.engine.wait_s is None
    run.engine.add(ask("a"))
    while run.engine.has_work:
        assert run.engine.wait_s == 0.0
        report = run.step()
        assert report is not None
        assert report.view is None
    assert run.engine.wait_s is None


def test_an_idle_engine_is_viewed_at_once_and_once():
    run = Watched()
    assert run.engine.wait_s == 0.0
    report = run.step()
    assert report is not None
    assert report.record is None
    assert len(run.groups) == 1
    assert run.engine.wait_s is None
    run.engine.watch(True)  # of another viewer: goes on
    assert run.engine.wait_s is None
    run.engine.watch(False)
    run.engine.add(ask("a"))
    report = run.step()
    assert report is not None
    assert report.view is None
    run.engine.watch(True)
    run.step()
    assert len(run.groups) == 2


def test_views_of_steps_come_together_and_those_of_blocks_four_times_a_second():
    run = Watched()
    run.engine.add(ask("a", max_tokens=60, ignore_eos=True))
    run.engine.add(ask("b", max_tokens=60, ignore_eos=True))
    times: list[float] = []
    while run.engine.has_work:
        before, now = len(run.groups), run.now
        report = run.step(0.03)
        assert report is not None
        assert report.view is None or len(report.view.steps) in (0, 1, 2)
        if len(run.groups) > before:
            times.append(now)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[:3] == pytest.approx([0.06] * 3)  # after a pause
    assert min(gaps[4:]) >= 0.24 - 1e-9
    assert run.engine.wait_s is not None  # the last steps, and then the blocks, are still to be viewed
    run.finish()
    assert [shown.step_index for shown in run.steps] == list(range(60))
    assert run.groups[-1][0].tables == []


def test_of_many_short_steps_some_are_left_out(monkeypatch):
    monkeypatch.setattr(view, "BURST", 10.0)
    monkeypatch.setattr(view, "STEP_RATE", 400.0)
    run = Watched()
    for name in "abc":
        run.engine.add(ask(name, max_tokens=60, ignore_eos=True))
        while run.engine.has_work:
            run.step(0.0005)  # five times as many as are viewed
    run.finish()
    indices = [shown.step_index for shown in run.steps]
    assert indices[:10] == list(range(10))
    assert indices[20:] == list(range(indices[20], 180, 5))


# What it changes


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_plans_are_the_same_watched_or_not(steps_in_flight):
    plans = []
    for watch in (False, True):
        run = Watched([BlockGroup(12)], watch=watch, max_steps_in_flight=steps_in_flight)
        for number in range(6):
            run.engine.add(ask(str(number), prompt=range(4 + number), max_tokens=12, ignore_eos=True))
        for _ in range(5):
            run.step()
        run.engine.abort("3")
        run.finish()
        plans.append(run.launched)
    assert plans[0] == plans[1]
