"""The open requests of a scheduler: which of their sequences run and wait, and how they end."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.caches import Caches
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.slot_table import SlotTable
from quire.engine.waiting import WaitingLine
from quire.types import Failure, Output, RowResult


class SequencePlaces:
    """Requests without all of their final outputs: each open sequence runs, waits, or follows another one."""

    def __init__(self, caches: Caches, max_num_seqs: int, policy: str) -> None:
        self.caches = caches
        self._requests: dict[str, ScheduledRequest] = {}
        self._slots = SlotTable(max_num_seqs)
        self._running = self._slots.sequences  # by slot, in the order of admission
        self._waiting = WaitingLine(policy)
        self._num_open = 0  # sequences

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for admission, at first or again."""
        return self._num_open - len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks not held by any sequence."""
        return self.caches.num_free

    @property
    def running(self) -> Iterable[Sequence]:
        """The sequences with a slot, in the order of their admission."""
        return self._running.values()

    @property
    def has_work(self) -> bool:
        """True while any sequence lacks its final output."""
        return self._num_open > 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def _finish_pooled(self, sequence: Sequence, got: RowResult, now: float) -> Output:
        if not got.vector:
            return self._fail(sequence, Failure("the device returned no vector"), now)
        return self._finish(sequence, sequence.final_output(now, "stop", vector=got.vector))

    def _release_followers(self, leader: Sequence) -> None:
        """Queue the other sequences once the prompt is computed and its full blocks can be shared."""
        request = leader.request
        for follower in request.followers:
            follower.chain = leader.chain[: leader.num_prompt // self.caches.block_size]
            follower.receipt.inherit(leader.receipt)
            self._waiting.put_before_queue(follower)
        request.followers = {}

    def _fail(self, sequence: Sequence, error: Failure, now: float) -> Output:
        """End one sequence with the error of its row."""
        return self._finish(sequence, sequence.final_output(now, "error", error=error))

    def _finish(self, sequence: Sequence, output: Output) -> Output:
        """End a sequence in any state. Every final output passes through here, once."""
        request = sequence.request
        leads = sequence not in request.followers
        if not leads:
            del request.followers[sequence]
        elif sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finished = True
        self._num_open -= 1
        request.num_open -= 1
        if not request.num_open:
            del self._requests[request.new.request_id]
            request.sequences = ()  # avoids a reference cycle
        elif leads and request.followers:  # it ended before computing the prompt: the next one leads
            follower = next(iter(request.followers))
            del request.followers[follower]
            self._waiting.put_before_queue(follower)
        return output

    def _vacate(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence."""
        self._slots.leave(sequence)
        self.caches.release(sequence)
        sequence.drafts = ()
        sequence.num_registered = sequence.num_computed = sequence.num_planned = 0

    def _check_open(self) -> None:
        """Raise AssertionError unless each open sequence is in one place, and consistent."""
        self._waiting.check()
        self._slots.check()
        places = [*self._running.values(), *self._waiting.before_queue]
        for request_id, request in self._requests.items():
            assert request.new.request_id == request_id
            open_sequences = [sequence for sequence in request.sequences if not sequence.finished]
            assert len(open_sequences) == request.num_open > 0
            places += request.followers
        assert len(places) == len(set(places)), "a sequence is in two places"
        assert not any(sequence.finished for sequence in places)
        for sequence in places[len(self._running) :]:
            assert (sequence.slot, sequence.tables, sequence.num_planned) == (-1, [], 0)
        for sequence in places:
            sequence.check(self.caches.block_size)
        assert len(places) + self._waiting.num_queued == self._num_open >= len(self._running)
