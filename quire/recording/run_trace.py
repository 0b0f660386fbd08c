"""A run as a trace for Perfetto: requests by phase, slots by step, the steps of the device, and counters.

The slices of a request's phases last as long as its receipt says: `queue`, `prefill`, `decode`, `preempted`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.engine.request import Sequence
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.recording.track_events import Note, TrackEvents
from quire.types import Output, RequestMetrics, Row, Step, StepResult

SHORTEST_S = 1e-9  # of a slice


class _Phase(NamedTuple):
    """A phase of a sequence; it lasts until the next one begins."""

    name: str
    begin_s: float


class _Stay(NamedTuple):
    """A sequence in a slot, and its rows: (begin, end, row)."""

    name: str
    slot: int
    begin_s: float
    rows: list[tuple[float, float, Row]]


class _Life:
    """The phases of a sequence."""

    def __init__(self, name: str, arrival_s: float) -> None:
        self.name = name
        self.end_s: float | None = None
        self.metrics: RequestMetrics | None = None
        self.phases = [_Phase("queue", arrival_s)]

    def observe(self, sequence: Sequence, now: float) -> None:
        """Take the phase from the receipt. A preemption may prove to have begun later than it seemed."""
        receipt, last = sequence.receipt, self.phases[-1]
        if self.end_s is not None:  # it ended while the step was in flight
            return
        if receipt.admitted_s is not None and last.name == "queue":
            self.phases.append(last := _Phase("prefill", receipt.admitted_s))
            if receipt.first_token_s is not None:  # before the recording began
                self.phases.append(last := _Phase("decode", receipt.first_token_s))
        if receipt.preempted_since_s is not None:
            if last.name == "preempted":
                self.phases.pop()
            self.phases.append(_Phase("preempted", receipt.preempted_since_s))
        elif last.name == "preempted":
            self.phases.append(_Phase("decode", now))
        elif last.name == "prefill" and receipt.first_token_s is not None:
            self.phases.append(_Phase("decode", receipt.first_token_s))

    def end(self, metrics: RequestMetrics) -> None:
        """Note the end; one that was aborted may have been admitted or preempted since its last step."""
        self.metrics, self.end_s = metrics, metrics.finished_s
        if (end_s := metrics.finished_s) is None:
            return
        if metrics.admitted_s is not None and self.phases[-1].name == "queue":
            self.phases.append(_Phase("prefill", metrics.admitted_s))
        seen_s = sum(
            until_s - since_s for name, since_s, until_s in self.slices(end_s) if name == "preempted"
        )
        if (unseen_s := metrics.preempted_s - seen_s) > SHORTEST_S:
            self.phases.append(_Phase("preempted", end_s - unseen_s))

    def slices(self, end_s: float) -> Iterable[tuple[str, float, float]]:
        """Yield (phase, begin, end) up to the end of the sequence, or `end_s`."""
        ends = [*(phase.begin_s for phase in self.phases[1:]), end_s]
        yield from ((name, begin_s, end) for (name, begin_s), end in zip(self.phases, ends, strict=True))


class RunTrace:
    """A trace of a run, fed with the calls of its scheduler in their order. Times are on the engine's clock.

    Only what ended at or after `since_s` is kept.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self._end_s = since_s
        self._events = TrackEvents("quire")
        self._lives: dict[tuple[str, int], _Life] = {}
        self._stays: dict[int, _Stay] = {}  # by slot
        self._in_flight: deque[list[_Stay | None]] = deque()  # by row; a slot may be given on meanwhile
        self._left: list[_Stay] = []
        self._requests = self._events.track("requests")
        self._slots = self._events.track("slots")
        self._steps = self._events.track("steps")
        self._running = self._events.counter("running", "sequences")
        self._waiting = self._events.counter("waiting", "sequences")
        self._tokens = self._events.counter("tokens of a step", "tokens")
        self._blocks = self._events.counter("free blocks", "blocks")
        self._roof = self._events.counter("share of the roof", "%")

    def planned(self, now: float, step: Step) -> None:
        """Note the slots that a step releases, those it gives to sequences, and whose its rows are."""
        for slot in step.released:
            if (stay := self._stays.pop(slot, None)) is not None:
                self._left.append(stay)
        for one in step.admitted:
            name = _name(one.request_id, one.sequence)
            self._stays[one.slot] = _Stay(name, one.slot, now, [])
        self._in_flight.append([self._stays.get(row.slot) for row in step.rows])

    def committing(self, sequences: Iterable[Sequence], now: float) -> None:
        """Note the sequences of a step before its results are taken in, and once more after that."""
        for sequence in sequences:
            new = sequence.request.new
            key = new.request_id, sequence.index
            if key not in self._lives:
                self._lives[key] = _Life(_name(*key), new.arrival_s)
            self._lives[key].observe(sequence, now)

    def committed(self, now: float, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        """Note a step whose results were taken in."""
        self._end_s = max(self._end_s, now)
        stays = self._in_flight.popleft()
        if now < self._since_s:
            return
        began_s, ended_s = result.began_s, result.ended_s
        for row, stay in zip(step.rows, stays, strict=True):
            if stay is not None:
                stay.rows.append((began_s, ended_s, row))
        notes = _notes(step, result, scheduler.law)
        self._events.slice(self._steps, f"{step.num_tokens} tokens", began_s, ended_s, notes)
        self._events.count(self._tokens, began_s, step.num_tokens)
        self._events.count(self._running, now, scheduler.num_running)
        self._events.count(self._waiting, now, scheduler.num_waiting)
        self._events.count(self._blocks, now, scheduler.num_free_blocks)
        if isinstance(share := notes.get("roof_percent"), float):
            self._events.count(self._roof, began_s, share)

    def ended(self, outputs: Iterable[Output]) -> None:
        """Note the sequences that these outputs end."""
        for output in outputs:
            if output.finish_reason is None or (metrics := output.metrics) is None:
                continue
            key = output.request_id, output.sequence
            life = self._lives.setdefault(key, _Life(_name(*key), metrics.arrival_s))
            life.end(metrics)

    def encoded(self) -> bytes:
        """Return the trace as a file. Call it once."""
        events = self._events
        lanes = _Lanes()
        for life in sorted(self._lives.values(), key=lambda one: one.phases[0].begin_s):
            begin_s = life.phases[0].begin_s
            end_s = self._end_s if life.end_s is None else life.end_s
            if end_s < self._since_s:
                continue
            lane = lanes.take(begin_s, end_s, lambda number: events.track(f"lane {number}", self._requests))
            events.slice(lane, life.name, begin_s, end_s, _receipt(life.metrics))
            for phase, since_s, until_s in life.slices(end_s):
                events.slice(lane, phase, since_s, until_s)
        self._write_slots()
        return events.encoded()

    def _write_slots(self) -> None:
        stays: dict[int, list[_Stay]] = {}
        for stay in (*self._left, *self._stays.values()):
            if stay.rows:
                stays.setdefault(stay.slot, []).append(stay)
        for slot in sorted(stays):
            track = self._events.track(f"slot {slot}", self._slots)
            for stay in stays[slot]:
                self._events.slice(track, stay.name, stay.rows[0][0], stay.rows[-1][1])
                for began_s, ended_s, row in stay.rows:
                    notes: dict[str, Note] = {"start": row.start, "count": row.count}
                    if row.drafted:
                        notes["drafted"] = len(row.drafted)
                    is_decode = row.sample and row.count == 1 + len(row.drafted)
                    kind = "decode" if is_decode else f"compute {row.count}"
                    self._events.slice(track, kind, began_s, ended_s, notes)


class _Lanes:
    """Tracks for slices that overlap: each slice takes a lane that is free again."""

    def __init__(self) -> None:
        self._free: list[tuple[float, int, int]] = []  # (end, order, track): a heap
        self._num_lanes = 0

    def take(self, begin_s: float, end_s: float, make: Callable[[int], int]) -> int:
        """Return the track for a slice. Slices are given in the order of their beginnings."""
        if self._free and self._free[0][0] <= begin_s:
            _, order, track = heapq.heappop(self._free)
        else:
            order = self._num_lanes = self._num_lanes + 1
            track = make(order)
        heapq.heappush(self._free, (end_s, order, track))
        return track


def _name(request_id: str, sequence: int) -> str:
    return f"request {request_id}" + (f", choice {sequence}" if sequence else "")


def _notes(step: Step, result: StepResult, law: StepLaw | None) -> dict[str, Note]:
    """Return what the slice of a step tells: its rows, where its time went, and the predicted time."""
    device_s = result.device_s
    notes: dict[str, Note] = {
        "step": step.index,
        "rows": len(step.rows),
        "tokens": step.num_tokens,
        "mask_ms": result.mask_s * 1e3,
        "sampling_ms": result.sampling_s * 1e3,
        "core_wait_ms": result.core_wait_s * 1e3,
        "draft_ms": result.draft_s * 1e3,
        "image_ms": result.image_s * 1e3,
    }
    if law is None or device_s <= 0:
        return notes
    num_logits = sum(row.num_logits for row in step.rows)
    values = law.values([(row.start, row.count) for row in step.rows], num_logits)
    limits = law.limits(values)
    return notes | {
        "predicted_ms": law.seconds(values) * 1e3,
        "roof_percent": 100 * law.roof_s(values) / device_s,
        "limit": max(limits.items(), key=lambda one: one[1])[0],
    }


def _receipt(metrics: RequestMetrics | None) -> dict[str, Note]:
    if metrics is None:
        return {}
    return {
        "preemptions": metrics.num_preemptions,
        "preempted_ms": metrics.preempted_s * 1e3,
        "interference_prefill_ms": metrics.prefill_interference_s * 1e3,
        "interference_decode_ms": metrics.decode_interference_s * 1e3,
        "grammar_ms": metrics.grammar_s * 1e3,
        "cached_saved_ms": metrics.cached_saved_s * 1e3,
        "ideal_ms": metrics.ideal_s * 1e3,
        "drafted_tokens": metrics.num_drafted,
        "accepted_tokens": metrics.num_accepted,
        "drafting_saved_ms": metrics.drafting_saved_s * 1e3,
    }
