"""Blocks that come from a store, or with a request: who waits for them, how long, and what they change."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from fake_runner import LAW, FakeRunner, Received
from fake_store import FakeFetch, FakeStore

from quire.engine import fetches
from quire.engine.block_exchange import BUSY_S
from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import Engine, request_limits, step
from quire.engine.epochs import EpochScheduler
from quire.engine.in_process import EngineThread, SharedEngine
from quire.engine.request import prompt_hashes
from quire.engine.status import Facts
from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output

SIZE, MAX_MODEL_LEN = 4, 96
WHOLE = (BlockGroup(60),)
MODELS = [
    WHOLE,
    (BlockGroup(60), BlockGroup(40, 9)),
    (StateGroup(12, 2), BlockGroup(60)),
    (BlockGroup(30, 6), StateGroup(9, 1), BlockGroup(40)),
    (BlockGroup(30, 7),),
]
STATES_ALONE = (StateGroup(9, 3),)
PROMPT = tuple(range(10, 10 + 41))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """An engine, its store and its clock, on which a step takes what LAW says."""

    def __init__(self, groups=WHOLE, store: FakeStore | None = None, runner=None, **limits) -> None:
        self.clock, self.store = Clock(), FakeStore() if store is None else store
        self.runner = runner or FakeRunner(list(groups), SIZE)
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": MAX_MODEL_LEN} | limits
        scheduler = EpochScheduler(groups=groups, block_size=SIZE, **options)
        scheduler.calibrate(LAW)
        self.engine = Engine(scheduler, self.runner, clock=self.clock, blocks=self.runner, store=self.store)
        self.received = Received(groups)
        self.requests: list[NewRequest] = []

    def add(self, request_id: str, prompt=PROMPT, brought=None, **params) -> NewRequest:
        new = NewRequest(
            request_id, tuple(prompt), SamplingParams(**{"max_tokens": 3} | params), self.clock()
        )
        self.engine.add(new, brought)
        self.requests.append(new)
        return new

    def step(self) -> list[Output]:
        self.clock.now += 1.0
        outputs = self.engine.step()
        self.received.take(outputs)
        self.engine.scheduler.check()
        return outputs

    def finish(self) -> list[Output]:
        outputs: list[Output] = []
        for _ in range(1000):
            if not self.engine.has_work:
                break
            outputs += self.step()
        assert not self.engine.has_work, "a request hangs"
        for new in self.requests:
            for sequence in range(new.params.n):
                self.received.verify(new, sequence, MAX_MODEL_LEN)
        return outputs


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("quire.engine.block_exchange.TELL_S", 1e9)


def kept(groups=WHOLE, prompt=PROMPT, **limits) -> FakeStore:
    """A store that an engine has filled with the blocks of a prompt and its answer."""
    world = World(groups, **limits)
    world.add("first", prompt)
    world.finish()
    world.engine.close()
    assert world.store.closed
    return world.store


@pytest.mark.parametrize("groups", MODELS)
def test_a_new_engine_finds_what_the_old_one_kept(groups) -> None:
    world = World(groups, kept(groups))
    world.add("again")
    (final,) = [output for output in world.finish() if output.finish_reason]
    assert final.num_cached_tokens >= 32
    assert sum(record.num_loaded_tokens for record in world.engine.records) >= SIZE
    assert sum(record.loaded_bytes for record in world.engine.records) > 0
    assert sum(record.num_tokens for record in world.engine.records) <= 41 + 2 - 32


def test_wrong_contents_would_show() -> None:
    store = kept()
    store.kept = {one: {0: bytes(len(content[0]))} for one, content in store.kept.items()}
    world = World(store=store)
    world.add("again")
    with pytest.raises(AssertionError, match="tokens differ"):
        world.finish()


def test_sequences_that_another_engine_ended_do_not_wait() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    params = SamplingParams(n=3, max_tokens=3)
    world.engine.add(NewRequest("a", PROMPT, params, 0.0, resumed=(None, (5,), None)))
    assert world.engine.num_waiting == 1


def test_others_go_on_while_a_request_waits() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    world.add("other", range(100, 110), max_tokens=1)
    world.add("waits")
    assert world.engine.num_waiting == 2
    fetches.MAX_LOSS, before = 100.0, fetches.MAX_LOSS
    try:
        for _ in range(8):
            world.step()
        assert ("other", 0) in world.received.final
        assert ("waits", 0) not in world.received.token_ids
        assert (world.engine.has_work, world.engine.num_waiting) == (True, 1)
        assert world.engine.wait_s == fetches.POLL_S
        store.fetches[0].arrive()
        assert world.engine.wait_s == 0.0
        outputs = world.finish()
    finally:
        fetches.MAX_LOSS = before
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert outputs[-1].num_cached_tokens == 40
    assert 8.0 <= metrics.fetch_s <= metrics.queue_s


@pytest.mark.parametrize("num_arrived", [0, 3, 9])
def test_a_request_waits_no_longer_than_computing_what_came_and_a_little(num_arrived: int) -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    world.add("waits")
    (fetch,) = store.fetches
    fetch.arrive(num_arrived)
    waited_s = LAW.text_s(0, num_arrived * SIZE, 16) + 0.05 * LAW.text_s(0, 40, 16)
    world.clock.now = waited_s - 0.01
    assert world.engine.wait_s == fetches.POLL_S
    world.clock.now = waited_s + 0.01
    assert world.engine.wait_s == 0.0
    outputs = world.finish()
    assert outputs[-1].num_cached_tokens == num_arrived * SIZE
    assert fetch.num_taken == 1


@pytest.mark.parametrize(("block_s", "fetched"), [(0.01, True), (0.6, True), (0.62, False), (9.0, False)])
def test_only_what_is_predicted_to_be_faster_is_fetched(block_s: float, fetched: bool) -> None:
    """Computing a block takes 0.875 s, by the law; a fetch must be well below."""
    store = kept()
    store.block_s = block_s
    world = World(store=store)
    world.add("again")
    assert bool(store.fetches) == fetched
    world.finish()


def test_a_store_slower_than_it_says_is_asked_less() -> None:
    prompts = [tuple(range(100 * i, 100 * i + 41)) for i in range(1, 9)]
    filled = World()
    for i, prompt in enumerate(prompts):
        filled.add(str(i), prompt)
    filled.finish()
    store = filled.store
    store.at_once, store.block_s = False, 0.1
    world, asked = World(store=store), []
    for i, prompt in enumerate(prompts):
        before = len(store.fetches)
        world.add(str(i), prompt)
        asked.append(len(store.fetches) > before)
        world.clock.now += 9.0
        world.finish()
    assert asked[0]
    assert not all(asked)


def test_without_a_law_a_token_is_taken_to_need_a_millisecond() -> None:
    for block_s, fetched in ((0.002, True), (0.004, False)):
        store = kept()
        store.block_s = block_s
        world = World(store=store)
        world.engine.scheduler._budget.law = None
        world.add("again")
        assert bool(store.fetches) == fetched


def test_what_the_cache_has_is_not_fetched() -> None:
    store = kept()
    world = World(store=store)
    world.add("again")
    world.finish()
    world.add("once more")
    world.finish()
    assert len(store.fetches) == 1


def test_one_fetch_at_a_time_and_the_next_may_need_none() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    for name in "abc":
        world.add(name)
    assert len(store.fetches) == 1
    store.fetches[0].arrive()
    world.finish()
    assert len(store.fetches) == 1
    assert {name: world.received.final[name, 0].num_cached_tokens for name in "abc"} == dict.fromkeys(
        "abc", 40
    )


@pytest.mark.parametrize("sequence", [None, 0, 1])
def test_aborts_while_it_waits(sequence: int | None) -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    world.add("a", n=2, temperature=1.0, seed=1)
    world.add("b")
    with pytest.raises(RequestError, match="in use"):
        world.engine.add(world.requests[1])
    world.engine.abort("a", sequence)
    world.engine.abort("unknown")
    assert store.fetches[0].num_taken == 1
    for fetch in store.fetches[1:]:
        fetch.arrive()
    world.finish()
    reasons = [world.received.final["a", i].finish_reason for i in (0, 1)]
    assert reasons == [("abort" if sequence in (None, i) else "length") for i in (0, 1)]
    assert not world.engine.exchange.num_held


def test_blocks_that_come_with_a_request() -> None:
    source = World(store=None)
    new = source.add("first")
    source.finish()
    hashes = prompt_hashes(new, SIZE)
    contents = source.engine.exchange.read([*hashes, b"unknown", hashes[0]])
    assert [one for one, _ in contents] == list(hashes)
    world, brought = World(store=FakeStore()), FakeFetch(contents, 4)
    world.add("second", brought=brought)
    assert world.engine.wait_s == fetches.POLL_S
    brought.arrive()
    outputs = world.finish()
    assert outputs[-1].num_cached_tokens == 40
    assert set(hashes) <= world.store.kept.keys(), "what came is kept"


def test_blocks_that_are_not_needed_are_not_waited_for() -> None:
    world = World()
    world.add("first")
    world.finish()
    brought = FakeFetch([(bytes(32), {0: bytes(32)})], 0)
    world.add("second", brought=brought)
    assert brought.num_taken == 1
    world.finish()


def test_contents_of_another_form_are_computed() -> None:
    store = kept()
    wrong = [{0: b"short"}, {7: bytes(32)}, {}, {0: bytes(33)}]
    contents = dict(store.kept)
    for i, one in enumerate(list(contents)[2:6]):
        contents[one] = wrong[i]
    brought = FakeFetch(list(contents.items()), len(contents))
    world = World()
    world.add("second", brought=brought)
    assert world.finish()[-1].num_cached_tokens == 2 * SIZE


def test_blocks_are_kept_while_steps_compute_and_once() -> None:
    world = World()
    world.add("a", range(200, 260), max_tokens=12)
    seen = []
    while world.engine.has_work:
        world.step()
        seen.append(len(world.store.kept))
    assert sorted(seen) == seen
    assert seen[3] > 4, "they are kept before the request ends"
    while world.engine.wait_s == 0.0:
        world.step()
    assert world.engine.wait_s is None
    assert len(world.store.kept) == 71 // SIZE
    num_put = world.store.num_put
    world.add("b", range(200, 260), max_tokens=12)
    world.finish()
    assert world.store.num_put == num_put == 71 // SIZE


def test_a_step_copies_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.block_exchange.STEP_BYTES", 33)
    world = World()
    world.add("a", range(200, 232), max_tokens=1)
    world.finish()
    assert len(world.store.kept) == 2 * len(world.engine.records) - 2
    world.engine.close()
    assert len(world.store.kept) == 8


def test_a_full_store_is_given_nothing() -> None:
    world = World()
    world.store.full = True
    world.add("a")
    world.finish()
    world.engine.close()
    assert not world.store.kept


def test_a_busy_store_is_given_blocks_later_and_in_order() -> None:
    world = World()
    world.store.busy = True
    world.add("a", range(200, 232), max_tokens=1)
    world.finish()
    assert (world.store.kept, world.engine.wait_s) == ({}, BUSY_S)
    world.store.busy = False
    assert world.engine.wait_s == 0.0
    world.step()
    assert world.engine.wait_s is None
    assert list(world.store.kept)[:7] == list(prompt_hashes(world.requests[0], SIZE))


def test_blocks_do_not_wait_for_a_busy_store_without_bound() -> None:
    world = World((BlockGroup(12),))
    world.store.busy = True
    for i in range(9):
        world.add(str(i), range(100 * i, 100 * i + 40), max_tokens=1)
        world.finish()
    assert len(world.engine.exchange._kept._entered) <= 12 + 10


def test_a_snapshot_that_comes_later_is_kept_too() -> None:
    groups = (StateGroup(12, 4), BlockGroup(60))
    world = World(groups)
    world.add("long", PROMPT)
    world.finish()
    hashes = prompt_hashes(world.requests[0], SIZE)
    assert [0 in world.store.kept[one] for one in hashes[:6]] == [False, False, False, True, False, False]
    world.add("short", PROMPT[:22])  # its last full block is the fifth
    world.finish()
    world.engine.close()
    assert 0 in world.store.kept[hashes[4]]


def test_without_a_prefix_cache_nothing_is_fetched_or_kept() -> None:
    store = kept()
    num_kept = len(store.kept)
    world = World(store=store, enable_prefix_caching=False)
    world.add("again", range(50))
    world.add("same")
    world.finish()
    assert (store.fetches, len(store.kept)) == ([], num_kept)


def test_salts_and_scores_keep_requests_from_loading() -> None:
    store = kept()
    world = World(store=store)
    new = world.add("salted")
    world.engine.add(replace(new, request_id="t", cache_salt="other"))
    world.requests.append(replace(new, request_id="t", cache_salt="other"))
    world.add("scored", prompt_logprobs=0)
    world.finish()
    cached = [world.received.final[name, 0].num_cached_tokens for name in ("salted", "t", "scored")]
    assert cached == [40, 0, 0]


def test_an_epoch_empties_the_caches() -> None:
    """What is loaded after it, and kept, are blocks of the new ones."""
    world = World(store=kept())
    world.engine.scheduler.begin_epoch(0.0)
    world.add("again")
    world.add("another", range(300, 330))
    world.finish()
    world.engine.close()
    assert world.received.final["again", 0].num_cached_tokens == 40
    assert set(prompt_hashes(world.requests[1], SIZE)) <= world.store.kept.keys()


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int) -> None:
    """Requests with common beginnings, small caches, one store for several engines, late and cut fetches."""
    random = Random(seed)
    groups = [*MODELS, STATES_ALONE][seed % 6]
    small = tuple(replace(one, num_blocks=26) if isinstance(one, BlockGroup) else one for one in groups)
    store, names = FakeStore(at_once=False), count()
    for _ in range(3):
        world = World(small, store, max_steps_in_flight=1 + seed % 2)
        store.fetches.clear()
        for _ in range(40):
            if random.random() < 0.4:
                begin = random.choice([PROMPT, tuple(range(7)), tuple(range(60))])[: random.randint(1, 60)]
                prompt = (*begin, *(random.randrange(3) for _ in range(random.randrange(9))), 1)
                world.add(
                    f"{next(names)}", prompt, n=random.choice([1, 1, 2]), max_tokens=random.randint(1, 9)
                )
            if store.fetches and random.random() < 0.5:
                store.fetches[-1].arrive(random.choice([None, random.randrange(10)]))
            if world.requests and random.random() < 0.1:
                world.engine.abort(random.choice(world.requests).request_id, random.choice([None, 0, 1]))
            world.step()
        world.finish()
        assert world.engine.scheduler.num_free_blocks == world.runner.num_blocks
        assert world.engine.scheduler.num_running == world.engine.num_waiting == 0


def test_a_thread_waits_for_fetches() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    limits = request_limits(world.engine.scheduler, None)

    async def ask() -> list[Output]:
        client = EngineThread(world.engine, Facts({}, limits, MAX_MODEL_LEN))
        stream = client.submit(NewRequest("a", PROMPT, SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.05)
        assert client.status.steps == 0
        store.fetches[0].arrive()
        outputs = await stream.get()
        await client.close()
        return outputs

    assert asyncio.run(ask())[-1].num_cached_tokens == 40


def test_threads_that_share_an_engine_wait_for_fetches() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    shared, got = SharedEngine(world.engine), []
    new = NewRequest("a", PROMPT, SamplingParams(max_tokens=1))
    stream = shared.submit(new, lambda own: got.extend(own.take()))
    for _ in range(3):
        shared.step(lambda: True)
    assert not got
    store.fetches[0].arrive()
    while not got:
        shared.step(lambda: True)
    assert got[-1].num_cached_tokens == 40
    del stream  # which would have aborted it


def test_an_engine_that_waits_for_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a server would take it for one that hangs: reading may take minutes, computing an hour."""
    monkeypatch.setattr("quire.engine.block_exchange.TELL_S", 1.0)
    store = kept()
    store.at_once = False
    world = World(store=store)
    world.add("waits")
    world.clock.now = 0.4
    assert (world.engine.wait_s, step(world.engine)[1]) == (fetches.POLL_S, None)
    store.fetches[0].arrive(8)
    reports = []
    for tenths in range(10, 42):
        world.clock.now = tenths / 10
        if world.engine.wait_s == 0.0:
            reports.append(step(world.engine)[1])
    assert [(one.record, one.num_waiting) for one in reports] == [(None, 1)] * 4


def test_reports_count_those_that_wait() -> None:
    store = kept()
    store.at_once = False
    world = World(store=store)
    world.add("other", range(100, 110), max_tokens=9)
    world.add("waits", n=3)
    _, report = step(world.engine)
    assert report is not None
    assert (report.num_running, report.num_waiting) == (1, 3)


def test_the_next_in_line_is_fetched_in_its_turn() -> None:
    filled = World()
    prompts = [tuple(range(100 * i, 100 * i + 41)) for i in range(1, 4)]
    for i, prompt in enumerate(prompts):
        filled.add(str(i), prompt)
    filled.finish()
    store = filled.store
    store.at_once = False
    world = World(store=store)
    for i, prompt in enumerate(prompts):
        world.add(str(i), prompt)
    store.fetches[0].arrive()
    world.step()
    assert len(store.fetches) == 2
    world.engine.abort("1")
    assert (len(store.fetches), store.fetches[1].num_taken) == (3, 1)
    store.fetches[2].arrive()
    world.finish()
    cached = [world.received.final[str(i), 0].num_cached_tokens for i in range(3)]
    assert cached == [40, 0, 40]


def test_what_was_reused_before_its_turn_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.block_exchange.STEP_BYTES", 0)
    world = World((BlockGroup(12),))
    world.add("a", range(200, 240), max_tokens=1)
    world.finish()
    world.add("b", range(300, 340), max_tokens=1)
    world.finish()
    world.engine.close()
    assert all(world.store.kept.values())
    assert set(prompt_hashes(world.requests[1], SIZE)) <= world.store.kept.keys()
    assert not set(prompt_hashes(world.requests[0], SIZE)[3:]) & world.store.kept.keys()


def test_a_request_that_another_engine_began_finds_its_answer_too() -> None:
    filled = World()
    filled.add("first", max_tokens=20, ignore_eos=True)
    filled.finish()
    filled.engine.close()
    emitted = tuple(filled.received.token_ids["first", 0])
    world = World(store=filled.store)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    new = NewRequest("first", PROMPT, params, resumed=(emitted[:14],))
    world.engine.add(new)
    assert world.engine.exchange.num_held == 1
    outputs: list[Output] = []
    while world.engine.has_work:
        outputs += world.engine.step()
    assert sum((output.token_ids for output in outputs), ()) == emitted[14:]
    assert world.engine.records[0].num_loaded_tokens == (41 + 14 - 1) // SIZE * SIZE
    assert sum(record.num_tokens for record in world.engine.records) < 10
