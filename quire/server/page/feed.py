"""The feed of the page: what the engine does, as frames of JSON for those who watch.

A frame has what has changed since the one before. While nobody watches, none are built, and the engine is
asked for no views.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from quire.engine.status import NUM_RECORDS, Facts, StepReport
from quire.engine.step_law import StepLaw
from quire.engine.view import StepView
from quire.errors import Overloaded
from quire.server.page import parts
from quire.server.page.parts import encode
from quire.server.service import ServiceState
from quire.server.steps import law_of
from quire.step_record import Record

MAX_VIEWERS = 64
NUM_STEPS = 1000  # of the past, in a viewer's first frame
FRAME_S = 0.05  # at least, between two frames
MAX_SENT_PER_S = 80  # frames to all viewers: one takes 0.1 ms to send
LOOK_S = 1.0  # at most, between two looks at what no report tells, such as the death of the engine
QUIET_S = 5.0  # after so long without a change, a frame has only its time
_NUM_TAGS = 4096  # kept


class Seen(NamedTuple):
    """The state that a viewer knows: the number of steps, and the versions of the other parts."""

    steps: int = 0
    facts: int = 0
    law: int = 0
    counts: int = 0
    cache: int = 0


class Feed:
    """Makes the frames of all viewers; those told equally much get the same bytes.

    Frames are made at ticks. A viewer that has not taken the last one yet gets none: the next one will have
    all that has changed, so nothing is queued for it.
    """

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._tag = lru_cache(_NUM_TAGS)(service.tag)
        self._num_viewers = 0
        self._closed = False
        self._steps: deque[bytes] = deque(maxlen=NUM_STEPS)  # the last ones, encoded
        self._last_record: Record | None = None
        self._records: deque[Record] = deque(maxlen=NUM_RECORDS)  # since the last steps that were viewed
        self._parts: dict[str, tuple[bytes, bytes]] = {}  # encoded: for those who may experiment, the second
        self._latest = Seen()
        self._facts: Facts | None = None
        self._law: StepLaw | None = None
        self._counts: parts.Counts | None = None
        self._now, self._now_s = Seen(), 0.0  # at the last tick
        self._num_ticks = 0
        self._tick = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._has_newcomer = False
        self._frames: dict[tuple[Seen, bool], bytes] = {}  # of the last tick

    async def frames(self, may_experiment: bool) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a viewer until the feed is closed. Raises Overloaded if there are too many."""
        if self._closed:
            raise Overloaded("the server is shutting down", "ask again")
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already", "close another page, or ask again later")
        self._enter()
        try:
            seen, num_ticks = Seen(), self._num_ticks
            while not self._closed:
                if num_ticks == self._num_ticks:
                    await self._tick.wait()
                    continue
                num_ticks, now = self._num_ticks, self._now
                yield self._frame(seen, may_experiment)
                seen = now
        finally:
            self._leave()

    def take_report(self, report: StepReport) -> None:
        """Take in the report of a step, if anybody watches."""
        if not self._num_viewers:
            return
        if report.record is not None:
            self._records.append(report.record)
        if (view := report.view) is not None:
            if view.steps:
                records = {record.index: record for record in self._records}
                self._records.clear()
                for step in view.steps:
                    if (record := records.get(step.step_index)) is not None:
                        self._add(record, step)
            if view.groups is not None:
                groups = [parts.Group.of(group, self._tag) for group in view.groups]
                self._set("cache", encode(parts.Cache(groups)))
            self._wake_at(self._now_s + self._period_s)

    def close(self) -> None:
        """End the frames of all viewers."""
        self._closed = True
        self._tick.set()

    # Viewers

    @property
    def _period_s(self) -> float:
        return max(FRAME_S, self._num_viewers / MAX_SENT_PER_S)

    def _enter(self) -> None:
        self._num_viewers += 1
        self._has_newcomer = True
        if self._num_viewers == 1:
            self._service.engine.watch(True)
            self._catch_up()
        self._wake_at(self._now_s + self._period_s)

    def _leave(self) -> None:
        self._num_viewers -= 1
        if not self._num_viewers:
            self._service.engine.watch(False)
            self._frames.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _catch_up(self) -> None:
        """Add the steps since somebody watched last, of which there are no views; forget the caches."""
        missed: list[Record] = []
        for record in reversed(self._service.first_status.records):
            if record is self._last_record or len(missed) == NUM_STEPS:
                break
            missed.append(record)
        for record in reversed(missed):
            self._add(record, None)
        self._set("cache", b"null")

    # Ticks

    def _wake_at(self, when_s: float) -> None:
        """Look for changes then, unless this will be done earlier."""
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._look)

    def _look(self) -> None:
        """Tick if something has changed, or nothing for long."""
        now_s = asyncio.get_running_loop().time()
        self._refresh()
        if self._latest != self._now or self._has_newcomer or now_s - self._now_s >= QUIET_S:
            self._now, self._now_s, self._has_newcomer = self._latest, now_s, False
            self._frames.clear()
            self._num_ticks += 1
            self._tick.set()
            self._tick = asyncio.Event()
        self._timer = None
        self._wake_at(now_s + LOOK_S)

    def _refresh(self) -> None:
        """Encode what has changed besides steps and caches."""
        service, status, facts = self._service, self._service.first_status, self._service.engine.status.facts
        if facts is not self._facts:
            self._facts = facts
            self._set("facts", *[encode(parts.ServerFacts.of(service, may)) for may in (False, True)])
        if status.law is not self._law or "law" not in self._parts:
            self._law = status.law
            self._set("law", encode(law_of(service)))
        counts = parts.Counts.of(status)
        if counts != self._counts:
            self._counts = counts
            self._set("counts", encode(counts))

    def _add(self, record: Record, view: StepView | None) -> None:
        service = self._service
        costs = service.engine.status.facts.costs
        self._steps.append(parts.encode_step(record, view, costs, self._tag, service.started_s))
        self._last_record = record
        self._latest = self._latest._replace(steps=self._latest.steps + 1)

    def _set(self, name: str, encoded: bytes, for_experiments: bytes | None = None) -> None:
        self._parts[name] = encoded, encoded if for_experiments is None else for_experiments
        self._latest = self._latest._replace(**{name: getattr(self._latest, name) + 1})

    def _frame(self, seen: Seen, may_experiment: bool) -> bytes:
        """Return what has changed, at the last tick, for a viewer who was told so far."""
        key, now = (seen, may_experiment), self._now
        if (frame := self._frames.get(key)) is not None:
            return frame
        fields = [b'"t":%.6f' % (self._now_s - self._service.started_s)]
        for name in ("facts", "law", "counts", "cache"):
            if getattr(seen, name) != getattr(now, name):
                fields.append(b'"%b":%b' % (name.encode(), self._parts[name][may_experiment]))
        if seen.steps != now.steps or seen == Seen():
            first = self._latest.steps - len(self._steps)
            steps = islice(self._steps, max(0, seen.steps - first), max(0, now.steps - first))
            fields.append(b'"steps":[%b]' % b",".join(steps))
        frame = self._frames[key] = b"{%b}\n" % b",".join(fields)
        return frame
