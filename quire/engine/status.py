"""Status of an engine: facts about it, its limits, and counters updated by its steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.engine.request_limits import RequestLimits
from quire.engine.step_law import StepLaw
from quire.types import Bound, Record

NUM_RECORDS = 4096  # kept for whoever asks what happened
State = Literal["starting", "ready", "restarting", "stopped"]


class Facts(NamedTuple):
    """Facts known once a model is loaded. `chosen` are the choices made for it, as text.

    `longest_context` is the maximum number of tokens of a sequence, memory permitting. `fingerprint`
    identifies everything that determines the bits of an answer. `ceilings` are measured rates of the machine,
    and when they were measured (`measured_at`, seconds since 1970).
    """

    chosen: dict[str, str]
    limits: RequestLimits
    longest_context: int
    fingerprint: str = ""
    ceilings: dict[str, float] | None = None


class StepReport(NamedTuple):
    """The record of a step, and the engine's counters after it. No record: only aborts were processed.

    `law` is the law of the time of steps, if it has changed.
    """

    record: Record | None
    num_running: int
    num_waiting: int
    num_free_blocks: int
    law: StepLaw | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the start."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    bound_s: dict[Bound, float] = field(default_factory=dict)  # Record.wall_s, by bound

    def add(self, record: Record) -> None:
        self.num_tokens += record.num_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_preemptions += record.num_preemptions
        self.seconds += record.seconds
        self.bound_s[record.bound] = self.bound_s.get(record.bound, 0.0) + record.wall_s


@dataclass(slots=True)
class EngineStatus:
    """The current status of an engine, updated in place. Times are of time.monotonic.

    `facts` are empty until the engine is first ready.
    """

    state: State = "starting"
    facts: Facts = field(default_factory=lambda: Facts({}, RequestLimits(0, (), 1, 1), 0))
    pid: int | None = None  # of the engine process, if it has one
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    steps: int = 0  # since the start, restarts included
    last_progress_s: float = 0.0  # when a step ended, or an idle engine received work
    has_work: bool = False
    num_restarts: int = 0
    num_bad_frames: int = 0
    totals: Totals = field(default_factory=Totals)
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))  # of the last steps
    law: StepLaw | None = None  # of the time of steps, as calibrated last

    @property
    def num_blocks(self) -> int:
        return self.facts.limits.num_blocks

    def take_facts(self, facts: Facts) -> None:
        """Note that the engine is ready."""
        self.state, self.facts = "ready", facts
        self.num_free_blocks = facts.limits.num_blocks

    def take_work(self) -> None:
        """Note that a request was sent."""
        if not self.has_work:
            self.has_work, self.last_progress_s = True, time.monotonic()

    def take_report(self, report: StepReport) -> None:
        """Update the counters after a step."""
        self.steps += 1
        self.last_progress_s = time.monotonic()
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.num_free_blocks = report.num_free_blocks
        if report.law is not None:
            self.law = report.law
        if report.record is not None:
            self.totals.add(report.record)
            self.records.append(report.record)

    def stalled(self, now: float, stall_s: float) -> str | None:
        """Return a description if the engine has work but finished no step for `stall_s`, else None."""
        still_s = now - self.last_progress_s
        if self.has_work and still_s > stall_s:
            return f"no step of the engine has ended for {still_s:.0f} s"
        return None

    def take_death(self) -> None:
        """Note that the engine died: nothing runs."""
        self.pid, self.has_work = None, False
        self.num_running = self.num_waiting = 0
        self.num_free_blocks = self.num_blocks
