"""The line of waiting sequences: those put before the queue, then the queue in the order of a policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.engine.policy import QueueState, make_queue
from quire.engine.request import Sequence


class WaitingLine:
    """Sequences waiting for admission: preempted ones and siblings of a computed prompt, then the queue."""

    def __init__(self, policy: str) -> None:
        self._first: OrderedDict[Sequence, None] = OrderedDict()
        self._queue = make_queue(policy)

    @property
    def before_queue(self) -> Iterable[Sequence]:
        """The sequences before the queue, in order."""
        return self._first

    @property
    def num_queued(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        self._queue.push(sequence)

    def put_first(self, sequence: Sequence) -> None:
        """Put a sequence before all others."""
        self._first[sequence] = None
        self._first.move_to_end(sequence, last=False)

    def put_before_queue(self, sequence: Sequence) -> None:
        """Put a sequence before the queue, after those put there already."""
        self._first[sequence] = None

    def peek(self) -> Sequence | None:
        """Return the next sequence, or None."""
        return next(iter(self._first)) if self._first else self._queue.peek()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it is in the line."""
        if sequence in self._first:
            del self._first[sequence]
        else:
            self._queue.remove(sequence)

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_tokens: int) -> None:
        """Charge computed tokens to the tenant of a sequence, for policies that share by tokens."""
        self._queue.charge(sequence, num_prompt_tokens, num_tokens)

    def queue_state(self) -> QueueState:
        """Return the state of the queue, for `restore`."""
        return self._queue.state()

    def restore(self, first: Iterable[Sequence], queue: QueueState) -> None:
        """Take over the sequences of another line, once and while empty."""
        self._first.update(dict.fromkeys(first))
        self._queue.restore(queue)

    def check(self) -> None:
        """Raise AssertionError unless the queue is consistent."""
        self._queue.check()
