"""What an engine tells a router: the hashes of prompts, and the changes of what is cached."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
from fake_runner import FakeRunner
from test_engine import ask

from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import Engine, request_limits, step
from quire.engine.epochs import EpochScheduler
from quire.engine.in_process import EngineThread
from quire.engine.request import prompt_hashes
from quire.engine.scheduler import Scheduler
from quire.engine.status import HASH_PREFIX_BYTES, CacheChanges, Facts, StepReport
from quire.sampling_params import SamplingParams
from quire.types import NewRequest

SIZE = 4  # tokens of a block
WHOLE = BlockGroup(24)


def make_engine(groups=(WHOLE,), runner: FakeRunner | None = None) -> Engine:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    scheduler = EpochScheduler(groups=groups, block_size=SIZE, **limits)
    return Engine(scheduler, runner or FakeRunner(list(groups), SIZE), clock=lambda: 0.0)


class Follower:
    """What someone knows who follows an engine's cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: set[bytes] = set()
        self.num_whole = 0
        engine.follow_cache(True)

    def step(self) -> StepReport | None:
        _, report = step(self.engine)
        if report is not None and report.cache is not None:
            self.take(report.cache)
        return report

    def take(self, changes: CacheChanges) -> None:
        if changes.whole:
            self.known.clear()
            self.num_whole += 1
        self.known |= split(changes.stored)
        self.known -= split(changes.evicted)

    def actual(self) -> set[bytes]:
        """The blocks that the pools have."""
        found = [set(pool.findable()) for pool in self.engine.scheduler.caches.whole]
        return {block_hash[:HASH_PREFIX_BYTES] for block_hash in set.intersection(*found)}


def split(joined: bytes) -> set[bytes]:
    return {joined[i : i + HASH_PREFIX_BYTES] for i in range(0, len(joined), HASH_PREFIX_BYTES)}


@pytest.mark.parametrize(
    "groups",
    [(WHOLE,), (WHOLE, BlockGroup(18)), (BlockGroup(24, window=8), WHOLE), (WHOLE, StateGroup(6, every=2))],
    ids=["one group", "two of different sizes", "a window", "states"],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_changes_of_each_step_give_what_can_be_found(groups, seed):
    dice, follower = Random(seed), Follower(make_engine(groups))
    evicted = 0
    for index in range(120):
        if dice.random() < 0.5:
            prompt = [dice.randrange(2)] * 8 + [dice.randrange(5) for _ in range(dice.randrange(1, 24))]
            follower.engine.add(ask(str(index), prompt, max_tokens=dice.randrange(1, 16), seed=1))
        before = follower.known.copy()
        follower.step()
        assert follower.known == follower.actual()
        evicted += len(before - follower.known)
    assert evicted > 20
    assert follower.num_whole == 1


def test_everything_is_told_at_first_and_after_the_caches_were_emptied():
    engine = make_engine()
    engine.add(ask("a", range(12)))
    while engine.has_work:
        assert step(engine)[1].cache is None
    assert engine.wait_s is None
    follower = Follower(engine)
    assert engine.wait_s == 0.0  # it is told at once, without a step
    assert follower.step().record is None
    assert len(follower.known) >= 3
    assert engine.wait_s is None
    assert follower.step() is None
    engine.scheduler.begin_epoch(0.0)
    follower.step()
    assert (follower.known, follower.num_whole) == (set(), 2)
    engine.follow_cache(False)
    assert engine.wait_s is None
    engine.add(ask("b", range(12)))
    while engine.has_work:
        assert step(engine)[1].cache is None
    assert all(pool.changed is None for pool in engine.scheduler.caches.whole)


def test_a_model_that_keeps_only_states_tells_nothing():
    engine = make_engine((StateGroup(6, every=2),))
    engine.follow_cache(True)
    engine.add(ask("a", range(12)))
    while engine.has_work:
        report = step(engine)[1]
        assert report.cache in (None, CacheChanges(b"", b"", True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_salt": "tenant"},
        {"adapter": "poems"},
        {"context_variant": 1},
        {"block_keys": ((5, b"cat"), (6, b"dog"))},
    ],
    ids=str,
)
def test_hashes_known_beforehand_are_those_of_the_scheduler(changes):
    groups = (WHOLE,)
    new = replace(NewRequest("a", tuple(range(14)), SamplingParams(max_tokens=1)), **changes)
    scheduler = Scheduler(
        groups=groups, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64
    )
    scheduler.add(new)
    found = scheduler.schedule(0.0)
    scheduler.commit(found, FakeRunner(groups, SIZE).launch(found).result(), 0.0)
    hashes = prompt_hashes(new, SIZE)
    assert len(hashes) == 3
    assert set(hashes) == set(scheduler.caches.whole[0].findable())
    other = replace(new, cache_salt="another")
    assert not set(prompt_hashes(other, SIZE)) & set(hashes)


def test_only_blocks_that_a_request_may_find_have_hashes():
    def count(num_tokens, **params):
        return len(prompt_hashes(ask("a", range(num_tokens), **params), SIZE))

    assert [count(n) for n in (3, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]  # the last token is always computed
    assert count(9, prompt_logprobs=1) == 0  # logits of all positions are needed
    assert len(prompt_hashes(replace(ask("a", range(9)), pooling="last"), SIZE)) == 0


def test_a_thread_reports_the_cache_while_it_is_followed():
    async def check() -> None:
        reports: list[StepReport] = []
        engine = make_engine()
        client = EngineThread(engine, Facts({}, request_limits(engine.scheduler, None), 0))
        client.on_record = reports.append
        stream = client.submit(ask("a", range(9), max_tokens=2))
        client.follow_cache(True)
        outputs = []
        while not any(output.finish_reason for output in outputs):
            outputs += await asyncio.wait_for(stream.get(), 30)
        await client.close()
        told = [report.cache for report in reports if report.cache is not None]
        assert told[0].whole
        stored = split(b"".join(changes.stored for changes in told))
        assert {one[:HASH_PREFIX_BYTES] for one in prompt_hashes(ask("a", range(9)), SIZE)} <= stored

    asyncio.run(check())
