"""Order of admission of waiting requests: first come first served, by priority, or token-fair.

A policy decides only the order of admission. Preempted sequences, and sequences that share the prompt of a
running one, are admitted before the whole queue (see `scheduler`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.engine.request import Sequence
from quire.types import NewRequest


class QueueState(NamedTuple):
    """All that later decisions of a queue depend on.

    `waiting` has the sequences, those of each tenant in order of arrival; `tenants` the counter of each, in
    the order in which they were first seen; `last_served` is the index of one of them, or -1.
    """

    waiting: tuple[Sequence, ...]
    tenants: tuple[tuple[str, int], ...] = ()
    last_served: int = -1


class WaitingQueue(Protocol):
    """A queue of waiting sequences. No operation takes more than O(log n)."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""

    def peek(self) -> Sequence | None:
        """Return the sequence to admit next, without removing it."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from any place in the queue."""

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Account for prompt tokens computed and output tokens generated for a tenant."""

    def state(self) -> QueueState:
        """Return the state, for `restore`."""

    def restore(self, state: QueueState) -> None:
        """Take over the state of another queue, once and while empty."""

    def check(self) -> None:
        """Raise AssertionError unless the queue is consistent."""


def make_queue(policy: str) -> WaitingQueue:
    """Return the queue for a value of `EngineConfig.scheduling_policy`."""
    if policy == "fair":
        return FairQueue()
    return KeyedQueue({"fcfs": first_come, "priority": by_priority}[policy])


def first_come(new: NewRequest) -> int:
    """Return one key for all requests: order of arrival."""
    return 0


def by_priority(new: NewRequest) -> int:
    """Return the priority: lower goes first, as in vLLM."""
    return new.priority


class KeyedQueue:
    """A heap by a key that is constant while a sequence waits; ties are in order of arrival.

    A removed sequence leaves a stale entry. Stale entries are removed when they are the majority, so that
    neither time nor memory grows with removals.
    """

    def __init__(self, key: Callable[[NewRequest], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, int]] = []  # (key, arrival)
        self._sequences: dict[int, Sequence] = {}  # by arrival
        self._arrival_of: dict[Sequence, int] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: Sequence) -> None:
        arrival = self._num_arrived
        self._num_arrived += 1
        self._sequences[arrival] = sequence
        self._arrival_of[sequence] = arrival
        heapq.heappush(self._heap, (self._key(sequence.request.new), arrival))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._sequences:
            heapq.heappop(self._heap)
        return self._sequences[self._heap[0][1]] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[self._arrival_of.pop(sequence)]
        if len(self._heap) > 2 * len(self._sequences) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._sequences]
            heapq.heapify(self._heap)

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        pass

    def state(self) -> QueueState:
        return QueueState(tuple(self._sequences.values()))

    def restore(self, state: QueueState) -> None:
        for sequence in state.waiting:
            self.push(sequence)

    def check(self) -> None:
        assert self._arrival_of == {sequence: arrival for arrival, sequence in self._sequences.items()}
        waiting = [entry for entry in self._heap if entry[1] in self._sequences]
        assert len(waiting) == len(self._sequences), "a waiting sequence is not in the heap, or twice"
        assert all(self._heap[(i - 1) // 2] <= entry for i, entry in enumerate(self._heap) if i)


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant: its weighted count of served tokens, and its waiting sequences in order of arrival."""

    index: int
    counter: int = 0
    in_heap: bool = False
    waiting: OrderedDict[Sequence, None] = field(default_factory=OrderedDict)


class FairQueue:
    """A token-fair queue: the tenant served least goes first (virtual token counters).

    Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2. A tenant that
    starts to wait is raised to the lowest counter among those waiting, so that idling earns no credit.
    Counters only grow: a heap entry may be too low but never too high, and is corrected when it reaches the
    top. A counter is kept for every tenant ever seen (a few dozen bytes each).
    """

    PROMPT_WEIGHT = 1
    OUTPUT_WEIGHT = 2  # an output token needs a forward pass; the weight of the paper

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._heap: list[tuple[int, int, Tenant]] = []  # (counter or a lower bound, tenant index, tenant)
        self._last_served: Tenant | None = None
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        if not tenant.waiting:
            floor = self._least() or self._last_served
            tenant.counter = max(tenant.counter, floor.counter if floor else 0)
            if not tenant.in_heap:
                tenant.in_heap = True
                heapq.heappush(self._heap, (tenant.counter, tenant.index, tenant))
        tenant.waiting[sequence] = None
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        tenant = self._least()
        return next(iter(tenant.waiting)) if tenant else None

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        del tenant.waiting[sequence]
        self._num_waiting -= 1
        if not tenant.waiting:
            self._last_served = tenant

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        cost = self.PROMPT_WEIGHT * num_prompt_tokens + self.OUTPUT_WEIGHT * num_output_tokens
        self._tenant(sequence).counter += cost

    def state(self) -> QueueState:
        tenants = self._tenants.values()
        waiting = tuple(sequence for tenant in tenants for sequence in tenant.waiting)
        counters = tuple((name, tenant.counter) for name, tenant in self._tenants.items())
        return QueueState(waiting, counters, self._last_served.index if self._last_served else -1)

    def restore(self, state: QueueState) -> None:
        for index, (name, counter) in enumerate(state.tenants):
            self._tenants[name] = tenant = Tenant(index, counter)
            if index == state.last_served:
                self._last_served = tenant
        for sequence in state.waiting:
            self._tenant(sequence).waiting[sequence] = None
        for tenant in self._tenants.values():
            if tenant.waiting:
                tenant.in_heap = True
                heapq.heappush(self._heap, (tenant.counter, tenant.index, tenant))
        self._num_waiting = len(state.waiting)

    def counter(self, tenant: str) -> int:
        """Return the counter of a tenant: weighted tokens it was served or raised to."""
        return self._tenants[tenant].counter if tenant in self._tenants else 0

    def _tenant(self, sequence: Sequence) -> Tenant:
        name = sequence.request.new.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(len(self._tenants))
        return tenant

    def _least(self) -> Tenant | None:
        """Return the waiting tenant with the lowest counter, correcting the top of the heap as needed."""
        while self._heap:
            counter, index, tenant = self._heap[0]
            if not tenant.waiting:
                heapq.heappop(self._heap)
                tenant.in_heap = False
            elif counter < tenant.counter:
                heapq.heapreplace(self._heap, (tenant.counter, index, tenant))
            else:
                return tenant
        return None

    def check(self) -> None:
        assert self._num_waiting == sum(len(tenant.waiting) for tenant in self._tenants.values())
        in_heap = {tenant.index for _, _, tenant in self._heap}
        assert len(in_heap) == len(self._heap), "a tenant is in the heap twice"
        for tenant in self._tenants.values():
            assert tenant.in_heap == (tenant.index in in_heap)
            assert tenant.in_heap or not tenant.waiting, "a waiting tenant is not in the heap"
        assert all(counter <= tenant.counter for counter, _, tenant in self._heap), "an entry is too high"
