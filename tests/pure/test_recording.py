"""Recordings of random histories replay: with contents to the same tokens, redacted to the same plans."""

from __future__ import annotations

import math
import os
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_runner import FakeRunner
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_scheduler_machine import SchedulerMachine

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.request import prompt_hashes
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.errors import ConfigError
from quire.program.features import LEADING
from quire.recording.chunks import JournalLimits
from quire.recording.entries import Began, Loaded, LoadedOutline
from quire.recording.incident import GroupShape, Header, Incident, Recording
from quire.recording.journal import Journal, JournaledScheduler
from quire.recording.replay import Difference, replay
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, RowResult, StepResult, TokenLogprob

TIMES = int(os.environ.get("QUIRE_TEST_TIMES", "1"))
FAILING = ("r3", "r11")


def make_law(seconds: float) -> StepLaw:
    stage = Stage((seconds, 0.0, 0.0, 0.0), (0.0, 0.0, seconds, 0.0))
    return StepLaw(LEADING, (stage,), (seconds, 0.0, 0.0, 0.0), (stage,), seconds, tail=1.0)


class Recorded:
    """The chunks of a journal, and recordings of them that begin with any of its epochs."""

    def __init__(self, contents: bool, epoch_bytes: int = 400) -> None:
        self.contents = contents
        self.chunks: list[tuple[bytes, str]] = []
        self.journal = Journal(JournalLimits(epoch_bytes, 1e9, contents), self.take, b"key")

    def take(self, chunk: bytes, kind: str) -> None:
        """Keep a chunk. Epochs grow: were all too short to compute what is open again, none would end."""
        self.chunks.append((chunk, kind))
        if kind == "epoch":
            limits = self.journal.limits
            self.journal.limits = limits._replace(epoch_bytes=limits.epoch_bytes * 3 // 2)

    def recordings_of_it(self) -> Recording:
        """The whole recording of a scheduler that was kept."""
        self.journal.flush()
        return self.recordings(self.scheduler)[0]

    def recordings(self, scheduler: JournaledScheduler) -> list[Recording]:
        header = Header(
            quire="1",
            build="b",
            arithmetic="a",
            checkpoint="c",
            contents=self.contents,
            config=EngineConfig(),
            groups=tuple(map(GroupShape.of, scheduler.groups)),
            arguments=scheduler.arguments,
            vocab_size=1 << 31,
        )
        begins = [i for i, (_, kind) in enumerate(self.chunks) if kind == "epoch"]
        return [
            Recording("here", Incident("", 0.0), header, tuple(memoryview(c) for c, _ in self.chunks[i:]))
            for i in begins
        ]


def first_step(recording: Recording) -> int:
    return next(entry.epoch.num_steps for entry in recording.entries() if isinstance(entry, Began))


class RecordedMachine(SchedulerMachine):
    """The scheduler's histories, recorded: epochs begin every few steps."""

    contents = True

    def make_scheduler(self, **arguments):
        self.recorded = Recorded(self.contents)
        return JournaledScheduler(self.recorded.journal, **arguments)

    @precondition(lambda self: self.requests)
    @rule(seconds=st.sampled_from([0.0, 1e-4, 0.02, 1.0]))
    def calibrate(self, seconds):
        self.scheduler.calibrate(make_law(seconds))

    def teardown(self):
        super().teardown()
        if not hasattr(self, "scheduler"):
            return
        self.recorded.journal.flush()
        failing = frozenset(str(i) for i, new in enumerate(self.requests) if new.request_id in FAILING)
        recordings = self.recorded.recordings(self.scheduler)
        for recording in recordings[:: max(1, len(recordings) // 3)]:
            runner = None
            if self.contents and not self.num_loaded:  # contents that were loaded are not recorded
                runner = FakeRunner(self.runner.groups, self.runner.block_size, failing, self.runner.eager)
                runner.num_steps = first_step(recording)
            verdict = replay(recording, runner, adapters=("x",))
            assert verdict.equal, str(verdict.difference)
            assert verdict.num_steps + first_step(recording) == self.runner.num_steps
            assert verdict.open_steps == ()


class RedactedMachine(RecordedMachine):
    contents = False


def many(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples * TIMES,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestRecordedMachine = RecordedMachine.TestCase
TestRecordedMachine.settings = many(40)
TestRedactedMachine = RedactedMachine.TestCase
TestRedactedMachine.settings = many(20)


class Numbers:
    """A device whose tokens are large numbers, each another: nothing else in a recording looks like them."""

    def __init__(self, first: int = 1_000_000_000) -> None:
        self.given: list[int] = []
        self.first = first

    def launch(self, step):
        rows = tuple(self.answer(row) for row in step.rows)
        return SimpleNamespace(result=lambda: StepResult(rows, 1.0, 2.0))

    def answer(self, row):
        if not row.sample:
            return RowResult()
        self.given.append(self.first + 7919 * len(self.given))
        return RowResult((self.given[-1],), ((TokenLogprob(self.given[-1], -0.25, 1),),))


PROMPT = tuple(range(1_500_000_000, 1_500_000_000 + 7919 * 11, 7919))
SECRETS = ("request-secret", "tenant-secret", "salt-secret", "grammar-secret")


def run_history(
    contents: bool, device=None, num_steps: int | None = None, recorded: Recorded | None = None, **options
) -> Recorded:
    """Two requests with everything that must stay secret, on a device that gives numbers."""
    recorded = recorded or Recorded(contents, 1 << 20)
    scheduler = JournaledScheduler(
        recorded.journal,
        groups=[BlockGroup(20)],
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=40,
        **options,
    )
    recorded.scheduler = scheduler
    device = recorded.device = device or Numbers()
    params = SamplingParams(
        max_tokens=9,
        logprobs=0,
        stop_token_ids=[2_000_000_011],
        logit_bias={2_000_000_019: 1.0},
        bad_words=[],
    )
    names = dict(zip(("tenant", "cache_salt", "grammar"), SECRETS[1:], strict=True))
    for number in range(2):
        new = NewRequest(f"{SECRETS[0]}-{number}", PROMPT, params, float(number), **names)
        scheduler.add(new)
    now = 10.0
    while scheduler.has_work and num_steps != 0:
        step = scheduler.schedule(now)
        if num_steps is not None:
            num_steps -= 1
            if not num_steps:
                break
        scheduler.commit(step, device.launch(step).result(), now + 1)
        now += 2
    return recorded


def content(recorded: Recorded) -> bytes:
    return b"".join(chunk for chunk, _ in recorded.chunks)


def found(recorded: Recorded) -> list[object]:
    """Tokens and names that can be found in a recording."""
    text = content(recorded)
    tokens = [*PROMPT, *recorded.device.given, 2_000_000_011, 2_000_000_019]
    names = [name for name in SECRETS if name.encode() in text]
    return [t for t in tokens if t.to_bytes(4, "big") in text or t.to_bytes(4, "little") in text] + names


def test_a_redacted_recording_has_no_token_and_no_name():
    redacted, whole = run_history(False), run_history(True)
    assert len(redacted.device.given) == 18
    assert found(redacted) == []
    assert set(whole.device.given) | set(PROMPT) <= set(found(whole))  # the search finds what is there
    assert not set(SECRETS[:3]) & set(found(whole))  # ids, tenants and salts are in none


def test_equal_prefixes_have_equal_hmacs_within_a_recording_only():
    began = next(run_history(False).recordings_of_it().entries())
    assert isinstance(began, Began)
    one, two = (opened.outline.blocks for opened in began.outlines)
    assert one == two
    assert len(set(one)) == len(one) == 2
    limits, kept = JournalLimits(1, 1.0), []
    keys = [Journal(limits, lambda *chunk: kept.append(chunk), key) for key in (b"one", b"two")]
    assert keys[0].mac(b"", b"x") != keys[1].mac(b"", b"x")


@pytest.mark.parametrize("contents", [True, False])
def test_a_recording_without_its_last_result_tells_which_step_was_open(contents):
    recorded = run_history(contents, num_steps=5)
    result = replay(recorded.recordings_of_it(), Numbers() if contents else None)
    assert (result.equal, result.num_steps, result.open_steps) == (True, 4, (4,))


def run_with_a_load(contents: bool) -> tuple[Recorded, int]:
    """Two requests, of which the second finds blocks that were loaded; and how many those are."""
    kept: dict[bytes, bytes] = {}
    for attempt in range(2):
        recorded, groups = Recorded(contents, 1 << 20), [BlockGroup(20)]
        limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 40}
        scheduler = JournaledScheduler(recorded.journal, groups=groups, block_size=4, **limits)
        recorded.scheduler, runner = scheduler, FakeRunner(groups, 4)
        num_loaded = 0
        for number, salt in enumerate(("", "salt-secret")):
            ids = tuple(t % 23 for t in PROMPT)
            new = NewRequest(f"r{number}", ids, SamplingParams(max_tokens=9), cache_salt=salt)
            hashes = prompt_hashes(new, 4)
            if attempt and salt:
                for group, block, index in scheduler.load(new, 0, [(0,)] * len(hashes)):
                    runner.write_blocks(group, [block], [kept[hashes[index]]])
                    num_loaded += 1
            scheduler.add(new)
            while scheduler.has_work:
                step = scheduler.schedule(1.0)
                scheduler.commit(step, runner.launch(step).result(), 2.0)
            pool = scheduler.caches.paged[0].pool
            kept |= {one: runner.read_blocks(0, [pool.find(one)])[0] for one in hashes}
    return recorded, num_loaded


@pytest.mark.parametrize("contents", [True, False])
def test_plans_replay_with_loaded_blocks(contents):
    recorded, num_loaded = run_with_a_load(contents)
    assert num_loaded == 2
    recording = recorded.recordings_of_it()
    (load,) = [entry for entry in recording.entries() if isinstance(entry, Loaded | LoadedOutline)]
    assert isinstance(load, Loaded) == contents
    result = replay(recording, None)
    assert (result.equal, result.num_steps) == (True, recorded.scheduler._num_steps)
    assert b"salt-secret" not in content(recorded)


@pytest.mark.parametrize("contents", [True, False])
def test_what_is_loaded_is_not_forgotten_by_an_epoch_that_is_due(contents):
    """Such as the first one: after a restart, the first request finds its blocks."""
    recorded, groups = Recorded(contents), [BlockGroup(20)]
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 40}
    scheduler = JournaledScheduler(recorded.journal, groups=groups, block_size=4, **limits)
    for number in range(6):
        new = NewRequest(
            f"r{number}", tuple(range(number, number + 12)), SamplingParams(max_tokens=1), number
        )
        loads = scheduler.load(new, 0, [(0,)] * 2)
        scheduler.add(new)
        step = scheduler.schedule(number + 0.25)
        assert (len(loads), step.rows[0].start) == (2, 8)
        result = StepResult((RowResult((5,)),), 1.0, 2.0)
        scheduler.commit(step, result, number + 0.5)
    recorded.journal.flush()
    recordings = recorded.recordings(scheduler)
    assert len(recordings) > 1
    for recording in recordings:
        assert replay(recording, None).equal


def test_tokens_do_not_replay_with_blocks_that_came_from_elsewhere():
    recording = run_with_a_load(True)[0].recordings_of_it()
    with pytest.raises(ConfigError, match="blocks were loaded whose contents are not recorded"):
        replay(recording, FakeRunner([BlockGroup(20)], 4))


def test_other_tokens_are_a_difference():
    recording = run_history(True).recordings_of_it()
    result = replay(recording, Numbers(first=1_000_000_001))
    assert result.difference == Difference(1, 0, "token_ids", "(1000000000,)", "(1000000001,)")


class Nudged(Numbers):
    """The same tokens, and log-probabilities of which one differs in its last bit."""

    def answer(self, row):
        got = super().answer(row)
        if len(self.given) != 7 or not got.logprobs:
            return got
        logprob = math.nextafter(-0.25, 0.0)
        return got._replace(logprobs=((TokenLogprob(self.given[-1], logprob, 1),),))


def test_another_bit_of_a_logprob_is_a_difference():
    result = replay(run_history(True).recordings_of_it(), Nudged())
    assert result.difference is not None
    assert result.difference.field == "digest of logprobs"


class Breaking(Numbers):
    def answer(self, row):
        if len(self.given) == 5:
            raise ArithmeticError("a broken kernel")
        return super().answer(row)


def test_a_step_that_fails_again_is_reported():
    device = Breaking()
    with pytest.raises(ArithmeticError):
        run_history(True, device)
    assert replay(run_history(True).recordings_of_it(), Breaking()).difference.field == "device"


@pytest.mark.parametrize("contents", [True, False])
@pytest.mark.parametrize("error", [AssertionError("torn"), KeyError("r1"), RuntimeError("nothing fits")])
def test_a_scheduler_that_failed_fails_again_or_not(contents, error, monkeypatch):
    def schedule(self, now):
        if self._num_steps == 5:
            raise error
        return plan(self, now)

    plan, other = Scheduler.schedule, run_history(contents).recordings_of_it()
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    recorded = Recorded(contents, 1 << 20)
    with pytest.raises(type(error)):
        run_history(contents, recorded=recorded)
    device = Numbers() if contents else None
    result = replay(recorded.recordings_of_it(), device)
    assert (result.equal, result.num_steps) == (True, 5)
    assert result.failure == f"scheduler: {type(error).__name__}: {error}"
    result = replay(other, Numbers() if contents else None)
    assert (result.difference.step, result.difference.field) == (5, "scheduler")


@pytest.mark.parametrize("contents", [True, False])
def test_another_scheduler_is_a_difference(contents):
    recording = run_history(contents).recordings_of_it()
    recording.header.arguments["max_num_batched_tokens"] = 7
    result = replay(recording, Numbers() if contents else None)
    assert result.difference is not None
    assert (result.difference.step, result.difference.row, result.difference.field) == (0, 0, "count")


@pytest.mark.parametrize("contents", [True, False])
def test_garbage_in_place_of_a_value_is_an_error_or_a_difference(contents):
    """Whatever one byte is changed to, nothing but a ConfigError is raised."""
    recorded = run_history(contents)
    outcomes = Counter()
    for number in range(0, len(content(recorded)), 7):
        changed, position = Recorded(contents), number
        changed.scheduler = recorded.scheduler
        for chunk, kind in recorded.chunks:
            if 0 <= position < len(chunk):
                flipped = chunk[position] ^ (0x55 if number % 2 else 0x01)
                chunk = chunk[:position] + bytes([flipped]) + chunk[position + 1 :]
            position -= len(chunk)
            changed.chunks.append((chunk, kind))
        try:
            result = replay(changed.recordings_of_it(), Numbers() if contents else None)
        except ConfigError:
            outcomes["error"] += 1
        else:
            outcomes["equal" if result.equal else "different"] += 1
    assert min(outcomes["error"], outcomes["different"]) > 10
