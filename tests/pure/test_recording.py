"""Recordings of random histories replay: with contents to the same tokens, redacted to the same plans."""

from __future__ import annotations

import os

from fake_runner import FakeRunner
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_scheduler_machine import SchedulerMachine

from quire.config import EngineConfig
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import Feature
from quire.recording.chunks import JournalLimits
from quire.recording.entries import Began
from quire.recording.incident import GroupShape, Header, Incident, Recording
from quire.recording.journal import Journal, JournaledScheduler
from quire.recording.replay import replay

TIMES = int(os.environ.get("QUIRE_TEST_TIMES", "1"))
FAILING = ("r3", "r11")
FEATURES = (Feature("one"), Feature("tokens"))


def make_law(seconds: float) -> StepLaw:
    stage = Stage((seconds, 0.0), (0.0, seconds))
    return StepLaw(FEATURES, (stage,), (seconds, 0.0), (stage,), seconds)


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
            vocab_size=1 << 30,
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
    @rule(seconds=st.floats(0, 1))
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
            if self.contents:
                runner = FakeRunner(self.runner.groups, self.runner.block_size, failing, self.runner.eager)
                runner.num_steps = first_step(recording)
            verdict = replay(recording, runner)
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
TestRecordedMachine.settings = many(100)
TestRedactedMachine = RedactedMachine.TestCase
TestRedactedMachine.settings = many(100)
