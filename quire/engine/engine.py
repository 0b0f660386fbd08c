"""The engine: a scheduler, a runner and a clock. Synchronous, on token ids, one thread at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.block_store import BlockAccess, BlockStore, Fetch
from quire.engine.adapter_table import AdapterTable
from quire.engine.block_exchange import BlockExchange
from quire.engine.caches import BlockGroup
from quire.engine.drafter import Drafter
from quire.engine.fetches import POLL_S, LoadedBlocks
from quire.engine.followed_cache import FollowedCache
from quire.engine.meter import Meter, Times, Verdict
from quire.engine.request_limits import RequestLimits
from quire.engine.scheduler import Scheduler
from quire.engine.status import CacheChanges, StepReport
from quire.engine.view import View, Views
from quire.errors import EngineDead, RequestError
from quire.step_record import Record
from quire.types import Admission, Draft, NewRequest, Output, Step, StepResult


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
    drafting_s: float  # looking for drafts before it
    loaded: LoadedBlocks  # before it


class Engine:
    """Turns requests into outputs, step by step.

    While the device computes a step, the next one is planned and launched, up to the scheduler's
    `max_steps_in_flight`, so that the device does not wait for Python.

    `clock` gives seconds; `NewRequest.arrival_s` must be read from the same one (by default
    `time.monotonic`, which all processes of a machine share). `vocab_size`, when given, bounds the
    token ids of prompts. The last `num_records` step records are kept in `records`. A `meter` adds verdicts
    to them; the scheduler gets the laws that it finds between two steps. A `drafter` proposes tokens for
    the sequences for which the scheduler wants drafts; those of grammars and draft models come with results.

    `adapters` are those that requests may have.
    `blocks` copies contents of cache blocks for a `store`, from which requests get what the cache lacks
    (`fetches.py`), and for other engines.
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
        drafter: Drafter | None = None,
        blocks: BlockAccess | None = None,
        store: BlockStore | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.vocab_size = vocab_size
        self.records: deque[Record] = deque(maxlen=num_records)
        self.meter = meter
        self._drafter = drafter
        self.adapters = adapters
        self._found: dict[tuple[str, int], tuple[Draft, ...]] = {}  # drafts that came with the last results
        self._in_flight: deque[_InFlight] = deque()  # the oldest first
        self._idle_since_s: float | None = None  # since when the device has been idle with open requests
        self._aborted: list[Output] = []  # final outputs to be returned by the next step
        self._cause_of_death: str | None = None
        self._views: Views | None = None  # while somebody watches
        self._followed: FollowedCache | None = None  # while somebody follows what is cached
        self.on_admitted: Callable[[tuple[Admission, ...]], None] | None = None  # before their first rows
        self.exchange = None if blocks is None else BlockExchange(scheduler, blocks, store, clock)
        self._calibrate()

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to return."""
        if self._cause_of_death is not None:
            return False
        computes = self.scheduler.has_work or bool(self._aborted) or bool(self._in_flight)
        return computes or self._holds

    @property
    def _holds(self) -> bool:
        """True while requests wait for blocks from a store."""
        return self.exchange is not None and self.exchange.num_held > 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait: for blocks from a store, or for admission."""
        return self.scheduler.num_waiting + (self.exchange.num_held if self.exchange is not None else 0)

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is something to do: 0 with work; None if a call must come first."""
        if self.scheduler.has_work or self._aborted or (self._followed and self._followed.is_whole_due):
            return 0.0
        waits_s = [
            None if self.exchange is None else self.exchange.wait_s,
            None if self._views is None else self._views.wait_s(),
        ]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def watch(self, on: bool) -> None:
        """Add views to the reports of steps from now on, or no longer. The caches are viewed at once."""
        if not on or self._views is None:
            self._views = Views(self.scheduler, self.clock) if on else None

    def follow_cache(self, on: bool) -> None:
        """Add changes of what is cached to the reports, beginning with all that is; or no longer."""
        if self._followed is not None:
            self._followed.stop()
        self._followed = FollowedCache(self.scheduler.caches) if on else None

    def add(self, request: NewRequest, brought: Fetch | None = None) -> None:
        """Add a request. Raises RequestError if it can never run, EngineDead after a failure.

        `brought` are blocks that come with it, from another engine; they are waited for like those of a
        store.
        """
        self._check_alive()
        validate(request, self.scheduler, self.vocab_size)
        if request.adapter and (self.adapters is None or request.adapter not in self.adapters):
            raise RequestError("the adapter of the request is not loaded", "load it first", "model")
        if self.exchange is not None:
            if request.request_id in self.exchange:
                raise _in_use(request.request_id)
            if self.exchange.hold(request, brought):
                return
        self._enter(request)

    def _enter(self, request: NewRequest) -> None:
        self.scheduler.add(request)
        if self._drafter is not None:
            self._drafter.add(request)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. The next step returns its final outputs.

        Unknown and ended ones are ignored.
        """
        if self._cause_of_death is None:
            if self.exchange is not None and (held := self.exchange.drop(request_id)) is not None:
                self._enter(held)
            outputs = self.scheduler.abort(request_id, self.clock(), sequence)
            if self._drafter is not None:
                self._drafter.observe(outputs)
            self._aborted += outputs

    def step(self) -> list[Output]:
        """Launch all steps that can be launched, wait for the oldest one, and return its outputs.

        Without work there are none. Raises EngineDead if the runner fails, and on every later call: all open
        requests end with it.
        """
        self._check_alive()
        outputs, self._aborted = self._aborted, []
        try:
            outputs += self._step()
            return outputs if self.exchange is None else self.exchange.with_fetch_times(outputs)
        except BaseException as failure:  # an interrupt also leaves the device in an unknown state
            self._cause_of_death = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, Exception):
                raise self._dead() from failure
            raise

    def take_view(self, changed: bool) -> View | None:
        """Return the view that is due, if any. `changed`: the last step gave something."""
        if self._views is None:
            return None
        return self._views.take(changed)

    def take_cache_changes(self) -> CacheChanges | None:
        """Return the changes of what is cached since the last call, None without any or unless followed."""
        return None if self._followed is None else self._followed.take()

    def close(self) -> None:
        """Keep what is still to be kept of the caches, and release what is not memory."""
        if self.exchange is not None:
            self.exchange.close(whole=self._cause_of_death is None)

    def _step(self) -> list[Output]:
        exchange = self.exchange
        if exchange is not None and exchange.over and not self._in_flight:
            for request in exchange.take():
                self._enter(request)
        if exchange is None or not exchange.over:  # contents are loaded when no step is in flight
            while len(self._in_flight) < self.scheduler.max_steps_in_flight and self._launch():
                pass
        if exchange is not None:
            exchange.copy()
        if self._in_flight:
            return self._collect()
        if exchange is not None and exchange.num_held and not exchange.over:
            time.sleep(POLL_S)
        return []

    def _launch(self) -> bool:
        """Plan a step and launch it; return False if none can be planned now."""
        scheduler, planned_s, drafting_s = self.scheduler, self.clock(), 0.0
        num_preemptions, num_cached_tokens = scheduler.num_preemptions, scheduler.num_cached_tokens
        if not self._in_flight and (self._found or self._drafter is not None):
            drafting_s = self._draft(planned_s)
        step = scheduler.schedule(planned_s)
        if step is None:
            return False
        if self._idle_since_s is None:
            self._idle_since_s = planned_s
        if step.admitted and self.on_admitted is not None:
            self.on_admitted(step.admitted)
        self._in_flight.append(
            _InFlight(
                step,
                self.runner.launch(step),
                planned_s,
                scheduler.num_waiting,
                scheduler.num_free_blocks,
                scheduler.num_cached_tokens - num_cached_tokens,
                scheduler.num_preemptions - num_preemptions,
                drafting_s,
                LoadedBlocks() if self.exchange is None else self.exchange.take_loaded(),
            )
        )
        return True

    def _draft(self, began_s: float) -> float:
        """Give the scheduler the drafts that it wants; return the time that it took, 0 if it wants none."""
        scheduler, drafter, found = self.scheduler, self._drafter, self._found
        self._found = {}
        names = scheduler.drafting()
        if not names:
            return 0.0
        proposed = drafter.propose(names) if drafter is not None else [()] * len(names)
        for name, drafts in zip(names, proposed, strict=True):
            if drafts := found.get(name, ()) + drafts:
                scheduler.draft(*name, drafts)
        return self.clock() - began_s

    def _collect(self) -> list[Output]:
        """Wait for the oldest step in flight and commit its results."""
        oldest = self._in_flight.popleft()
        step, result = oldest.step, oldest.pending.result()
        if self._views is not None:
            self._views.take_step(step, result)
        sequences = self.scheduler.oldest_in_flight
        outputs = self.scheduler.commit(step, result, self.clock())
        self._found = {
            (sequence.request.new.request_id, sequence.index): got.drafts
            for sequence, got in zip(sequences, result.rows, strict=True)
            if got.drafts
        }
        if self._drafter is not None:
            self._drafter.observe(outputs)
        times = self._times(result, oldest.drafting_s)
        verified = self.scheduler.verified
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
                num_drafts=verified.num_drafts,
                num_drafted=verified.num_drafted,
                num_accepted=verified.num_accepted,
                drafting_saved_s=verified.saved_s,
                draft_s=times.draft_s,
                num_loaded_tokens=oldest.loaded.num_tokens,
                loaded_bytes=oldest.loaded.num_bytes,
                load_s=oldest.loaded.seconds,
                image_s=times.image_s,
            )
        )
        self._calibrate()
        if self.adapters is not None and self.adapters.has_unloaded and not self._holds:
            self.adapters.free(self.scheduler.adapters())
        return outputs

    def _times(self, result: StepResult, drafting_s: float) -> Times:
        """Return where the time since the step before went, and note since when the device is idle."""
        idle_since_s = result.began_s if self._idle_since_s is None else self._idle_since_s
        self._idle_since_s = max(result.ended_s, idle_since_s) if self.scheduler.has_work else None
        return Times(
            result.device_s,
            max(0.0, result.began_s - idle_since_s),
            result.mask_s,
            result.sampling_s,
            result.core_wait_s,
            result.draft_s,
            drafting_s,
            result.image_s,
        )

    def _calibrate(self) -> None:
        """Give the scheduler a new law of steps, if there is one."""
        if self.meter is not None and (law := self.meter.new_law()) is not None:
            self.scheduler.calibrate(law, self.meter.draft_law)

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
        raise _in_use(request.request_id)
    request_limits(scheduler, vocab_size).check(request)


def _in_use(request_id: str) -> RequestError:
    problem = f"request id {request_id!r} is in use"
    return RequestError(problem, "give every open request its own id", "request_id")


def request_limits(scheduler: Scheduler, vocab_size: int | None) -> RequestLimits:
    """Return the limits of a scheduler."""
    groups = tuple(group for group in scheduler.caches.groups if isinstance(group, BlockGroup))
    batched = scheduler.max_num_batched_tokens
    return RequestLimits(scheduler.max_model_len, groups, scheduler.block_size, batched, vocab_size)


def step(engine: Engine) -> tuple[list[Output], StepReport | None]:
    """Step an engine; return its outputs and the report. Raises EngineDead if the step fails.

    There is no report while no step has finished, no view is due and no change of the caches is known, but
    once a second while requests wait for blocks.
    """
    before, law = engine.records[-1] if engine.records else None, engine.scheduler.law
    outputs = engine.step()
    after = engine.records[-1] if engine.records else None
    record, scheduler = None if after is before else after, engine.scheduler
    changed = record is not None or bool(outputs)
    view, cache = engine.take_view(changed), engine.take_cache_changes()
    waits = engine.exchange is not None and engine.exchange.take_progress()
    if not changed and view is None and cache is None and not waits:
        return outputs, None
    return outputs, StepReport(
        record,
        scheduler.num_running,
        engine.num_waiting,
        scheduler.num_free_blocks,
        None if scheduler.law is law else scheduler.law,
        view,
        cache,
        stores=None if engine.exchange is None else engine.exchange.counters(),
    )
