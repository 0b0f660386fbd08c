"""How the engine's process stands, and how long it is waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from quire.server.messages import Ready, StepReport
from quire.types import Record

State = Literal["starting", "ready", "restarting", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the engine's process is waited for, in seconds, and how often it is started again.

    A step of a large model on a slow machine takes long: `stall_s` only turns health false, and true again
    when a step ends; `hang_s` ends a process that no step will ever leave, so that no stream hangs for ever.
    """

    stall_s: float = 10.0
    hang_s: float = 300.0
    first_delay_s: float = 0.5  # before a restart; doubled at each death within `window_s`
    longest_delay_s: float = 10.0
    window_s: float = 300.0
    max_deaths: int = 10  # within `window_s`: then it is left alone
    stop_s: float = 2.0

    def delay_s(self, num_deaths: int) -> float:
        """How long to wait after so many deaths within the window."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (num_deaths - 1))


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the start of the server."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0

    def add(self, record: Record) -> None:
        self.num_tokens += record.num_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_preemptions += record.num_preemptions
        self.seconds += record.seconds


@dataclass(slots=True)
class EngineStatus:
    """How the engine stands; kept up to date. Times are of time.monotonic."""

    state: State = "starting"
    pid: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0  # since the start of the server, restarts included
    last_progress_s: float = 0.0  # when a step ended, or work came to an idle engine
    has_work: bool = False
    num_restarts: int = 0
    num_bad_frames: int = 0
    chosen: dict[str, str] = field(default_factory=dict)
    max_model_len: int = 0
    longest_context: int = 0
    totals: Totals = field(default_factory=Totals)

    def take_ready(self, ready: Ready) -> None:
        self.state = "ready"
        self.chosen, self.num_blocks, self.num_free_blocks = ready.chosen, ready.num_blocks, ready.num_blocks
        self.max_model_len, self.longest_context = ready.max_model_len, ready.longest_context

    def take_report(self, report: StepReport) -> None:
        """After each step."""
        self.steps += 1
        self.last_progress_s = time.monotonic()
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.num_free_blocks = report.num_free_blocks
        if report.record is not None:
            self.totals.add(report.record)

    def take_death(self) -> None:
        """Nothing runs."""
        self.pid, self.has_work = None, False
        self.num_running = self.num_waiting = 0
        self.num_free_blocks = self.num_blocks
