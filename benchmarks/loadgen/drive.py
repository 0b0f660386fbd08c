"""Sending requests at their moments, or as many at once as wanted, and keeping what came of each."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from loadgen.metrics import Timeline
from loadgen.workload import Request

# Takes a request and when it was planned for; gives what its client saw.
Send = Callable[[Request, float | None], Awaitable[Timeline]]


@dataclass(slots=True)
class Run:
    """What came of all requests. Times are of one clock, `cpu_s` is this process's own processor time."""

    begin_s: float
    end_s: float = 0.0
    cpu_s: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)
    injected: list[Timeline] = field(default_factory=list)  # not part of the figures

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
) -> Run:
    """Send all requests; those `injected` at their moments, whatever else is going on.

    An open loop sends each at its moment; a closed loop sends the next when one has ended. Neither has more
    than `max_concurrency` open, nor begins one after `until_s`. A run ends with the last answer.
    """
    cpu_s = time.process_time()
    run = Run(time.perf_counter())
    gate = asyncio.Semaphore(max_concurrency or sys.maxsize)
    tasks: set[asyncio.Task[None]] = set()

    def start(request: Request, keep: list[Timeline], planned_s: float | None) -> None:
        task = asyncio.create_task(follow(request, keep, planned_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def follow(request: Request, keep: list[Timeline], planned_s: float | None) -> None:
        progress.num_sent += 1
        timeline = await send(request, planned_s)
        keep.append(timeline)
        progress.num_ended += 1
        progress.num_failed += bool(timeline.error)
        if keep is run.timelines:
            gate.release()

    async def inject() -> None:
        for request in sorted(injected, key=lambda request: request.at_s):
            await asyncio.sleep(run.begin_s + request.at_s - time.perf_counter())
            start(request, run.injected, None)

    injecting = asyncio.create_task(inject())
    async with progress:
        for request in requests:
            planned_s = run.begin_s + request.at_s if is_open else None
            if planned_s is not None:
                await asyncio.sleep(planned_s - time.perf_counter())
            await gate.acquire()
            if until_s is not None and time.perf_counter() - run.begin_s > until_s:
                break
            start(request, run.timelines, planned_s)
        while tasks:
            await asyncio.gather(*tasks)
    run.end_s = max((timeline.end_s for timeline in run.timelines), default=run.begin_s)
    injecting.cancel()
    run.cpu_s = time.process_time() - cpu_s
    return run


class Progress:
    """One line on a terminal that says how far a run is; nothing where nobody looks."""

    PERIOD_S, WIDTH = 0.5, 24

    def __init__(self, total: int | None, until_s: float | None) -> None:
        self.total, self.until_s = total, until_s
        self.num_chunks = self.num_sent = self.num_ended = self.num_failed = 0
        self._begin_s = time.perf_counter()
        self._task: asyncio.Task[None] | None = None

    def chunk(self) -> None:
        self.num_chunks += 1

    async def __aenter__(self) -> Progress:
        self._begin_s = time.perf_counter()
        if sys.stderr.isatty():
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
            line = f"{bar:░<{self.WIDTH}} {passed_s:3.0f} s  {self.num_sent - self.num_ended} open, "
            line += f"{self.num_ended:,} ended, {self.num_failed:,} failed, {rate:,.0f} chunks/s"
            print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)
