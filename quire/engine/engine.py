"""The engine: a scheduler, a runner and a clock. Synchronous, on token ids, one thread at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.engine.caches import BlockGroup
from quire.engine.meter import Meter, Times, Verdict
from quire.engine.request_limits import RequestLimits
from quire.engine.scheduler import Scheduler
from quire.engine.status import StepReport
from quire.errors import EngineDead, RequestError
from quire.types import NewRequest, Output, Record, Step, StepResult


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step: one RowResult for each row, in the order of `step.rows`."""


class StepRunner(Protocol):
    """Computes steps. For each slot it keeps the tokens and the block tables that steps brought."""

    def launch(self, step: Step) -> PendingStep:
        """Start a step after those launched before it; results are collected in the same order."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step, and the part of its record that is known when it is planned."""

    step: Step
    pending: PendingStep
    planned_s: float
    num_waiting: int
    num_free_blocks: int
    num_cached_tokens: int
    num_preemptions: int


class Engine:
    """Turns requests into outputs, step by step.

    While the device computes a step, the next one is planned and launched, up to the scheduler's
    `max_steps_in_flight`, so that the device does not wait for Python.

    `clock` gives seconds; `NewRequest.arrival_s` must be read from the same one (by default
    `time.monotonic`, which all processes of a machine share). `vocab_size`, when given, bounds the
    token ids of prompts. The last `num_records` step records are kept in `records`. A `meter` adds verdicts
    to them; the scheduler gets the laws that it finds between two steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        clock: Callable[[], float] = time.monotonic,
        vocab_size: int | None = None,
        num_records: int = 4096,
        meter: Meter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.vocab_size = vocab_size
        self.records: deque[Record] = deque(maxlen=num_records)
        self.meter = meter
        self._in_flight: deque[_InFlight] = deque()  # the oldest first
        self._idle_since_s: float | None = None  # since when the device has been idle with open requests
        self._aborted: list[Output] = []  # final outputs to be returned by the next step
        self._cause_of_death: str | None = None
        self._calibrate()

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to return."""
        if self._cause_of_death is not None:
            return False
        return self.scheduler.has_work or bool(self._aborted) or bool(self._in_flight)

    def add(self, request: NewRequest) -> None:
        """Add a request. Raises RequestError if it can never run, EngineDead after a failure."""
        self._check_alive()
        validate(request, self.scheduler, self.vocab_size)
        self.scheduler.add(request)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. The next step returns its final outputs.

        Unknown and ended ones are ignored.
        """
        if self._cause_of_death is None:
            self._aborted += self.scheduler.abort(request_id, self.clock(), sequence)

    def step(self) -> list[Output]:
        """Launch all steps that can be launched, wait for the oldest one, and return its outputs.

        Without work there are none. Raises EngineDead if the runner fails, and on every later call: all open
        requests end with it.
        """
        self._check_alive()
        outputs, self._aborted = self._aborted, []
        try:
            return outputs + self._step()
        except BaseException as failure:  # an interrupt also leaves the device in an unknown state
            self._cause_of_death = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, Exception):
                raise self._dead() from failure
            raise

    def _step(self) -> list[Output]:
        while len(self._in_flight) < self.scheduler.max_steps_in_flight and self._launch():
            pass
        return self._collect() if self._in_flight else []

    def _launch(self) -> bool:
        """Plan a step and launch it; return False if none can be planned now."""
        scheduler, planned_s = self.scheduler, self.clock()
        num_preemptions, num_cached_tokens = scheduler.num_preemptions, scheduler.num_cached_tokens
        step = scheduler.schedule(planned_s)
        if step is None:
            return False
        if self._idle_since_s is None:
            self._idle_since_s = planned_s
        self._in_flight.append(
            _InFlight(
                step,
                self.runner.launch(step),
                planned_s,
                scheduler.num_waiting,
                scheduler.num_free_blocks,
                scheduler.num_cached_tokens - num_cached_tokens,
                scheduler.num_preemptions - num_preemptions,
            )
        )
        return True

    def _collect(self) -> list[Output]:
        """Wait for the oldest step in flight and commit its results."""
        oldest = self._in_flight.popleft()
        step, result = oldest.step, oldest.pending.result()
        outputs = self.scheduler.commit(step, result, self.clock())
        idle_since_s = result.began_s if self._idle_since_s is None else self._idle_since_s
        self._idle_since_s = max(result.ended_s, idle_since_s) if self.scheduler.has_work else None
        times = Times(
            result.ended_s - result.began_s - result.mask_s,
            max(0.0, result.began_s - idle_since_s),
            result.mask_s,
            result.sampling_s,
            result.core_wait_s,
        )
        verdict = Verdict() if self.meter is None else self.meter.judge(step, times)
        self.records.append(
            Record(
                index=step.index,
                num_rows=len(step.rows),
                num_tokens=step.num_tokens,
                num_waiting=oldest.num_waiting,
                num_free_blocks=oldest.num_free_blocks,
                num_cached_tokens=oldest.num_cached_tokens,
                num_preemptions=oldest.num_preemptions,
                seconds=self.clock() - oldest.planned_s,
                device_s=times.device_s,
                idle_s=times.idle_s,
                mask_s=times.mask_s,
                sampling_s=times.sampling_s,
                core_wait_s=times.core_wait_s,
                predicted_s=verdict.predicted_s,
                roof_share=verdict.roof_share,
                bound=verdict.bound,
            )
        )
        self._calibrate()
        return outputs

    def _calibrate(self) -> None:
        """Give the scheduler a new law of steps, if there is one."""
        if self.meter is not None and (law := self.meter.new_law()) is not None:
            self.scheduler.calibrate(law)

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise self._dead()

    def _dead(self) -> EngineDead:
        return EngineDead(
            f"a step failed ({self._cause_of_death})", "restart the engine; requests can be sent again"
        )


def validate(request: NewRequest, scheduler: Scheduler, vocab_size: int | None = None) -> None:
    """Raise RequestError unless the scheduler can run every sequence of the request to completion."""
    if request.request_id in scheduler:
        raise RequestError(
            f"request id {request.request_id!r} is in use", "give every open request its own id", "request_id"
        )
    request_limits(scheduler, vocab_size).check(request)


def request_limits(scheduler: Scheduler, vocab_size: int | None) -> RequestLimits:
    """Return the limits of a scheduler."""
    groups = tuple(group for group in scheduler.caches.groups if isinstance(group, BlockGroup))
    batched = scheduler.max_num_batched_tokens
    return RequestLimits(scheduler.max_model_len, groups, scheduler.block_size, batched, vocab_size)


def step(engine: Engine) -> tuple[list[Output], StepReport | None]:
    """Step an engine; return its outputs and the report. Raises EngineDead if the step fails.

    There is no report while no step has finished.
    """
    before, law = engine.records[-1] if engine.records else None, engine.scheduler.law
    outputs = engine.step()
    after = engine.records[-1] if engine.records else None
    record, scheduler = None if after is before else after, engine.scheduler
    if record is None and not outputs:
        return outputs, None
    return outputs, StepReport(
        record,
        scheduler.num_running,
        scheduler.num_waiting,
        scheduler.num_free_blocks,
        None if scheduler.law is law else scheduler.law,
    )
