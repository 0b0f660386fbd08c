"""Sending of requests at planned moments (open loop) or a number at a time (closed loop).

It works with callbacks, because tasks would cost more than the requests themselves.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.progress import in_terminal

Done = Callable[[Timeline], None]
POLL_S = 0.5  # between two looks of a Watch
# Takes a request, the moment it was planned for, and the function to call with its timeline.
Send = Callable[[Request, float | None, Done], None]


class Watch(Protocol):
    """An observer that may end a run early."""

    def is_hopeless(self) -> bool:
        """Return True to end the run; called every POLL_S."""

    def abandon(self) -> None:
        """End all open requests. No other is sent."""


@dataclass(slots=True)
class LoadRun:
    """The timelines of all requests. Times are of one clock; `cpu_s` is this process's own processor time."""

    begin_s: float
    end_s: float = 0.0
    cpu_s: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)
    injected: list[Timeline] = field(default_factory=list)  # not counted in the figures
    was_abandoned: bool = False

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


async def drive(
    requests: Iterable[Request],
    send: Send,
    progress: Progress,
    *,
    is_open: bool,
    max_concurrency: int | None = None,
    until_s: float | None = None,
    injected: Iterable[Request] = (),
    watch: Watch | None = None,
) -> LoadRun:
    """Send all requests, and those `injected` at their moments in addition; return when all have ended.

    An open loop sends each request at its moment, a closed loop the next one when another has ended. Neither
    has more than `max_concurrency` open, nor sends one after `until_s`. A `watch` may end the run.
    """
    cpu_s = time.process_time()
    driver = _Driver(requests, send, progress, is_open, max_concurrency or sys.maxsize, until_s)
    run = driver.run
    async with progress:
        timers = [driver.at(request.at_s, driver.inject, request) for request in injected]
        polling = asyncio.create_task(driver.poll(watch)) if watch else None
        driver.go_on()
        try:
            await driver.ended
        finally:
            if polling:
                polling.cancel()
    for timer in timers:
        timer.cancel()
    run.end_s = max((timeline.end_s for timeline in run.timelines), default=run.begin_s)
    run.cpu_s = time.process_time() - cpu_s
    return run


class _Driver:
    """The state of a run. It sends whatever is due whenever a request is due or has ended."""

    def __init__(
        self,
        requests: Iterable[Request],
        send: Send,
        progress: Progress,
        is_open: bool,
        max_concurrency: int,
        until_s: float | None,
    ) -> None:
        self.run = LoadRun(time.perf_counter())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._send, self._progress = send, progress
        self._is_open, self._max_concurrency, self._until_s = is_open, max_concurrency, until_s
        self._num_open = self._num_injected = 0
        self._timer: asyncio.TimerHandle | None = None  # until the next is due

    def at(self, at_s: float, call: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        """Schedule a call at a moment of the run."""
        delay_s = self.run.begin_s + at_s - time.perf_counter()
        return asyncio.get_running_loop().call_later(delay_s, call, *args)

    def go_on(self) -> None:
        """Send whatever is due. End the run if nothing is left."""
        try:
            self._send_due()
        except Exception as error:  # of the iterator of requests
            self._next = None
            if not self.ended.done():
                self.ended.set_exception(error)
        if self._next is None and not self._num_open + self._num_injected and not self.ended.done():
            self.ended.set_result(None)

    def _send_due(self) -> None:
        self._timer = None
        while self._next is not None and self._num_open < self._max_concurrency:
            request, now_s = self._next, time.perf_counter()
            passed_s = now_s - self.run.begin_s
            if self._is_open and request.at_s > passed_s:
                self._timer = self.at(request.at_s, self.go_on)
                return
            if self._until_s is not None and passed_s > self._until_s:
                self._next = None
                return
            self._num_open += 1
            planned_s = self.run.begin_s + request.at_s if self._is_open else None
            self._start(request, planned_s, self._done)
            self._next = next(self._requests, None)

    async def poll(self, watch: Watch) -> None:
        """End the run once the watch says so."""
        while not watch.is_hopeless():
            await asyncio.sleep(POLL_S)
        self._next = None
        self.run.was_abandoned = True
        watch.abandon()
        self.go_on()

    def inject(self, request: Request) -> None:
        self._num_injected += 1
        self._start(request, None, self._injected_done)

    def _start(self, request: Request, planned_s: float | None, done: Done) -> None:
        self._progress.num_sent += 1
        self._send(request, planned_s, done)

    def _done(self, timeline: Timeline) -> None:
        self._num_open -= 1
        self._end(timeline, self.run.timelines)

    def _injected_done(self, timeline: Timeline) -> None:
        self._num_injected -= 1
        self._end(timeline, self.run.injected)

    def _end(self, timeline: Timeline, keep: list[Timeline]) -> None:
        keep.append(timeline)
        self._progress.num_ended += 1
        self._progress.num_failed += bool(timeline.error)
        if self._timer is None:
            self.go_on()


class Progress:
    """A line in the terminal that shows how far a run is.

    It is drawn by hand: rich's bars take milliseconds, by which chunks would be read too late.
    """

    PERIOD_S, WIDTH = 0.5, 24

    def __init__(self, total: int | None, until_s: float | None, label: str = "") -> None:
        self.total, self.until_s, self.label = total, until_s, label
        self.num_chunks = self.num_sent = self.num_ended = self.num_failed = 0
        self._begin_s = time.perf_counter()
        self._task: asyncio.Task[None] | None = None

    def chunk(self) -> None:
        self.num_chunks += 1

    async def __aenter__(self) -> Progress:
        self._begin_s = time.perf_counter()
        if in_terminal():
            self._task = asyncio.create_task(self._show())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
            print(end="\r\x1b[K", file=sys.stderr, flush=True)

    async def _show(self) -> None:
        last = 0
        while True:
            await asyncio.sleep(self.PERIOD_S)
            passed_s = time.perf_counter() - self._begin_s
            share = passed_s / self.until_s if self.until_s else self.num_ended / (self.total or 1)
            bar = "█" * round(self.WIDTH * min(share, 1.0))
            rate = (self.num_chunks - last) / self.PERIOD_S
            last = self.num_chunks
            line = (
                f"{self.label}{bar:░<{self.WIDTH}} {passed_s:3.0f} s  {self.num_sent - self.num_ended} open, "
            )
            line += f"{self.num_ended:,} ended, {self.num_failed:,} failed, {rate:,.0f} chunks/s"
            print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)
