"""A step under construction: rows are added until the token budget is used up."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.budget import StepTime
from quire.engine.caches import Caches
from quire.engine.request import Sequence
from quire.program.caches import MAX_DRAFTED
from quire.types import Admission, Grant, ImageSlice, PromptImage, Row, Snapshot, Step


@dataclass(slots=True)
class Plan:
    """The parts of a step planned at `now`.

    The device has done so much of the work of encoding the image in `encoding`.
    """

    caches: Caches
    budget: int  # tokens left
    time: StepTime | None  # left, if it is bounded
    now: float
    most: int  # tokens that it may have in any case
    encoding: tuple[PromptImage, int] | None = None
    image_slice: ImageSlice | None = None
    sequences: list[Sequence] = field(default_factory=list)  # those of the rows
    rows: list[Row] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    granted: list[Grant] = field(default_factory=list)
    restored: list[Snapshot] = field(default_factory=list)
    saved: list[Snapshot] = field(default_factory=list)
    drafted: bool = False  # some row verifies drafted tokens

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the next `count` tokens of a prompt fit in; after a cut one, no prompt does."""
        fitting, scored = self._until_image(sequence, start, count), sequence.request.lacks_prompt_logprobs
        fitting = min(fitting, self.budget)
        if self.time is not None:
            fitting = self.time.cut(start, fitting, scored)
        if (image := sequence.request.whole_at(start + fitting)) is not None:
            fitting = self._around(image, start)
        if self.time is not None and fitting:
            self.time.add(start, fitting, scored)
        if fitting < count or fitting > self.budget:
            self.budget = fitting
        if fitting and any(image.first < start + fitting for image in sequence.unseen(start)):
            self.encoding = None  # the device gives it to the row, or encodes another one for it
        return fitting

    def _until_image(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of the next `count` tokens of a prompt need no image that is yet to be encoded.

        Beside rows that give tokens, images are encoded in slices, as large as a chunk of a prompt might be:
        at most one in a step, of an image that the tokens begin with. Without such rows nobody waits, and
        images are encoded at once.
        """
        if not sequence.request.new.images or not any(row.sample for row in self.rows):
            return count
        for image in sequence.unseen(start):
            if image.first >= start + count:
                break
            if image.first > start:
                return image.first - start
            if not self._encode(sequence, image):
                return 0
        return count

    def _encode(self, sequence: Sequence, image: PromptImage) -> bool:
        """Encode as much of an image as fits in; return True if all of it will be encoded."""
        current, done = self.encoding or (None, 0)
        if current is not image:
            done = 0
        if done == image.work:
            return True
        if self.image_slice is not None:
            return False
        count = min(image.work - done, self.budget)
        if self.time is not None:
            count = self.time.cut(0, count)
        if not count:
            return False
        if self.time is not None:
            self.time.add(0, count)
        self.budget -= count
        self.encoding = image, done + count
        self.image_slice = ImageSlice(sequence.request.new.request_id, image, done, done + count)
        return done + count == image.work

    def _around(self, image: tuple[int, int], start: int) -> int:
        """Return how many tokens from `start` on are computed where a step would divide an image.

        They end before it. One that they begin with is computed whole, if the step has no other chunk: it may
        exceed what prompts have of a step, but not the step.
        """
        first, end = image
        if start < first:
            return first - start
        has_chunk = any(row.count > 1 for row in self.rows)
        has_room = end - start <= self.most - sum(row.count for row in self.rows)
        return end - start if has_room and not has_chunk else 0

    def add_row(self, sequence: Sequence, count: int, token_ids: tuple[int, ...] = ()) -> None:
        """Add a row for the next `count` tokens of a sequence that has blocks for them."""
        start, ahead = sequence.num_planned, sequence.num_ahead
        sequence.num_planned = end = start + count
        sample = end == ahead < sequence.request.max_known  # pooling gives no token
        num_logits = 1 if end == ahead else 0
        if sequence.request.lacks_prompt_logprobs:
            num_logits = count
        if self.caches.states and not sequence.request.new.pooling:
            self.saved += self.caches.save(sequence, start, end)
        if sample:
            sequence.num_ahead = ahead + 1
        self.budget -= count
        self.sequences.append(sequence)
        row = (sequence.slot, start, count, token_ids, sample, num_logits, ())
        self.rows.append(tuple.__new__(Row, row))  # takes half the time of Row(...)

    def room(self, sequence: Sequence) -> int:
        """Return how many drafted tokens a sequence may have in this step, if there are blocks for them."""
        return min(MAX_DRAFTED, self.budget, sequence.request.max_known - sequence.num_known - 1)

    def verify(self, index: int, token_ids: tuple[int, ...], num_spare: int) -> tuple[int, ...]:
        """Let a row that samples verify drafted tokens, as far as there is room; return those.

        It takes no blocks that others need: `num_spare` of each group remain free.
        """
        sequence, row = self.sequences[index], self.rows[index]
        num_known, most = sequence.num_known, min(len(token_ids), self.room(sequence))
        if most > sequence.capacity - num_known:
            self.granted += self.caches.grow(sequence, num_known + most, num_spare) or ()
            most = min(most, sequence.capacity - num_known)
        if most <= 0:
            return ()
        if self.caches.states:
            self.saved += self.caches.save(sequence, num_known, num_known + most)
        self.budget -= most
        self.drafted = True
        self.rows[index] = row._replace(
            count=row.count + most, num_logits=row.num_logits + most, drafted=token_ids[:most]
        )
        return token_ids[:most]

    def step(self, index: int, released: list[int], num_proposed: int) -> Step:
        """Return the finished step."""
        return Step(
            index,
            tuple(self.rows),
            tuple(self.admitted),
            tuple(self.granted),
            tuple(released),
            tuple(self.restored),
            tuple(self.saved),
            num_proposed,
            self.image_slice,
        )
