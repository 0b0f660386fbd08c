"""Epochs: moments from which a recorded run can be replayed without what went before.

At the beginning of an epoch all running sequences are preempted and the caches are forgotten. What later
plans depend on is then small enough to be written down: the open requests with their emitted tokens, their
order, the counters of tenants, and the law. A resumed sequence gives the bits it would have given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.engine.epoch_state import Epoch, EpochRequest, EpochSequence, SequenceName
from quire.engine.policy import QueueState
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.scheduler import Scheduler


class EpochScheduler(Scheduler):
    """A scheduler that can begin epochs, and start with the state of one."""

    @property
    def idle(self) -> bool:
        """True while no step is in flight."""
        return not self._in_flight

    @property
    def oldest(self) -> list[Sequence]:
        """The sequences of the oldest step in flight, by row."""
        return self._in_flight[0]

    def begin_epoch(self, now: float) -> Epoch:
        """Preempt all sequences, forget the caches, and return the state. No step may be in flight."""
        if self._in_flight:
            raise RuntimeError("an epoch begins between steps")
        for sequence in reversed(tuple(self._running.values())):
            self._preempt(sequence, now)
        self.caches.forget()
        self._encoding = None
        for request in self._requests.values():
            if request.owes_prompt_logprobs:
                request.prompt_logprobs, request.lacks_prompt_logprobs = [], True
            for sequence in request.sequences:
                _forget_blocks(sequence)
        queue = self._waiting.queue_state()
        return Epoch(
            num_steps=self._num_steps,
            requests=tuple(map(_epoch_request, self._requests.values())),
            first=tuple(map(_name, self._waiting.before_queue)),
            queued=tuple(map(_name, queue.waiting)),
            tenants=queue.tenants,
            last_served=queue.last_served,
            released=self._slots.released,
            law=self._budget.law,
            draft_law=self._speculation.draft_law,
            speculation=self._speculation.begin_epoch(self._requests.values()),
        )

    def restore(self, epoch: Epoch) -> None:
        """Take over the state at the beginning of an epoch, once and before any other call.

        Raises ValueError for a state that no scheduler with these arguments can have. The device holds
        nothing yet, so the first step does not release the slots that `epoch.released` names.
        """
        sequences: dict[SequenceName, Sequence] = {}
        for opened in epoch.requests:
            request = self._restored(opened)
            self._requests[opened.new.request_id] = request
            self._num_open += request.num_open
            for sequence in request.sequences:
                if not sequence.finished and sequence not in request.followers:
                    sequences[_name(sequence)] = sequence
        if sorted(sequences) != sorted((*epoch.first, *epoch.queued)):
            raise ValueError("the sequences in line are not those that wait")
        first = [sequences[name] for name in epoch.first]
        queued = tuple(sequences[name] for name in epoch.queued)
        self._waiting.restore(first, QueueState(queued, epoch.tenants, epoch.last_served))
        self._num_steps = epoch.num_steps
        if epoch.law is not None:
            self.calibrate(epoch.law, epoch.draft_law)
        if epoch.speculation is not None:
            self._speculation.restore(epoch.speculation)

    def _restored(self, opened: EpochRequest) -> ScheduledRequest:
        """Return the state of an open request. Raises ValueError."""
        new, private = opened.new, self._private or bool(opened.new.pooling)
        request = ScheduledRequest.of(new, self.max_model_len, self.block_size, private)
        num_sequences, indices = len(request.sequences), [one.number for one in opened.sequences]
        known = not indices or 0 <= min(indices) <= max(indices) < num_sequences
        if new.request_id in self._requests or not known or len(set(indices)) != len(indices) or not indices:
            raise ValueError("the sequences of a request are not those it can have")
        request.owes_prompt_logprobs = request.lacks_prompt_logprobs = opened.owes_prompt_logprobs
        for sequence in request.sequences:
            sequence.finished = sequence.index not in indices
        for one in opened.sequences:
            sequence = request.sequences[one.number]
            sequence.emitted = list(one.emitted)
            sequence.num_known = sequence.num_ahead = sequence.num_prompt + len(one.emitted)
            if sequence.num_known >= request.max_known + bool(new.pooling):
                raise ValueError("an open sequence has reached its length")
            sequence.num_resumed, sequence.num_cached_tokens = one.num_resumed, one.num_cached_tokens
            sequence.receipt = replace(one.receipt)
        request.followers = {request.sequences[one.number]: None for one in opened.sequences if one.follows}
        request.num_open = len(indices)
        return request


def _forget_blocks(sequence: Sequence) -> None:
    """Drop the hashes of blocks, and what the last attempt at admission found."""
    sequence.chain, sequence.num_wanted = [], ()


def _name(sequence: Sequence) -> SequenceName:
    return sequence.request.new.request_id, sequence.index


def _epoch_request(request: ScheduledRequest) -> EpochRequest:
    new = replace(request.new, resumed=())  # the tokens are with the sequences
    return EpochRequest(new, tuple(_epoch_sequences(request)), request.owes_prompt_logprobs)


def _epoch_sequences(request: ScheduledRequest) -> Iterator[EpochSequence]:
    """Yield the open sequences, followers last and in their order."""
    leading = [c for c in request.sequences if not c.finished and c not in request.followers]
    for sequence in (*leading, *request.followers):
        yield EpochSequence(
            sequence.index,
            tuple(sequence.emitted),
            sequence.num_cached_tokens,
            replace(sequence.receipt),
            sequence in request.followers,
            sequence.num_resumed,
        )
