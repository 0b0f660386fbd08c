"""A step under construction: rows are added until the token budget is used up."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.budget import StepTime
from quire.engine.caches import Caches
from quire.engine.request import Sequence
from quire.types import MAX_DRAFTED, Admission, Grant, Row, Snapshot, Step


@dataclass(slots=True)
class Plan:
    """The parts of a step planned at `now`. Drafted tokens leave budget for one of each running sequence."""

    caches: Caches
    budget: int  # tokens left
    time: StepTime | None  # left, if it is bounded
    num_running: int
    now: float
    sequences: list[Sequence] = field(default_factory=list)  # those of the rows
    rows: list[Row] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    granted: list[Grant] = field(default_factory=list)
    restored: list[Snapshot] = field(default_factory=list)
    saved: list[Snapshot] = field(default_factory=list)
    drafted: bool = False  # some row verifies drafted tokens

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the next `count` tokens of a prompt fit in; after a cut one, no prompt does."""
        fitting = min(count, self.budget)
        if self.time is not None:
            fitting = self.time.cut(start, fitting, sequence.request.lacks_prompt_logprobs)
        if fitting < count:
            self.budget = fitting
        return fitting

    def add_row(self, sequence: Sequence, count: int, token_ids: tuple[int, ...] = ()) -> None:
        """Add a row for the next `count` tokens of a sequence that has blocks for them, and its draft."""
        start, ahead = sequence.num_planned, sequence.num_ahead
        sequence.num_planned = end = start + count
        sample = end == ahead < sequence.request.max_known  # pooling gives no token
        num_logits = 1 if end == ahead else 0
        drafted: tuple[int, ...] = ()
        if sequence.drafted and sample:
            drafted = self._cut_draft(sequence, self.budget - count)
            count += len(drafted)
            num_logits += len(drafted)
        if sequence.request.lacks_prompt_logprobs:
            num_logits = count
        if self.caches.states and not sequence.request.new.pooling:
            self.saved += self.caches.save(sequence, start, start + count)
        if sample:
            sequence.num_ahead = ahead + 1
        self.budget -= count
        self.sequences.append(sequence)
        row = (sequence.slot, start, count, token_ids, sample, num_logits, drafted)
        self.rows.append(tuple.__new__(Row, row))  # takes half the time of Row(...)

    def _cut_draft(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Return the drafted tokens that fit, without taking blocks or tokens from other sequences."""
        drafted, sequence.drafted = sequence.drafted, ()
        num_others = max(0, self.num_running - len(self.rows) - 1)
        num_known = sequence.num_known
        most = min(len(drafted), MAX_DRAFTED, budget - num_others, sequence.request.max_known - num_known - 1)
        if most > sequence.capacity - num_known:
            self.granted += self.caches.grow(sequence, num_known + most) or ()
            most = min(most, sequence.capacity - num_known)
        if most <= 0:
            return ()
        self.drafted = True
        return drafted[:most]

    def step(self, index: int, released: list[int]) -> Step:
        """Return the finished step."""
        return Step(
            index,
            tuple(self.rows),
            tuple(self.admitted),
            tuple(self.granted),
            tuple(released),
            tuple(self.restored),
            tuple(self.saved),
        )
