"""The order of admission under each policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.policy import FairQueue, make_queue
from quire.engine.request import ScheduledRequest, Sequence
from quire.sampling_params import SamplingParams
from quire.types import NewRequest


def waiting(name: str, tenant: str = "", priority: int = 0) -> Sequence:
    new = NewRequest(name, (1, 2, 3), SamplingParams(), tenant=tenant, priority=priority)
    return ScheduledRequest.of(new, max_model_len=100, block_size=4, private=False).sequences[0]


def drain(queue) -> list[str]:
    order = []
    while (sequence := queue.peek()) is not None:
        order.append(sequence.request.new.request_id)
        queue.remove(sequence)
        queue.check()
    assert len(queue) == 0
    return order


def test_first_come_first_served():
    queue = make_queue("fcfs")
    for name in "cab":
        queue.push(waiting(name, priority=ord(name)))
    assert drain(queue) == ["c", "a", "b"]


def test_the_lower_priority_number_goes_first_then_arrival():
    queue = make_queue("priority")
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        queue.push(waiting(name, priority=priority))
    assert drain(queue) == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_removed_sequences_leave_nothing_behind(policy):
    queue = make_queue(policy)
    sequences = [waiting(str(i), tenant=str(i % 3), priority=i % 5) for i in range(1000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        queue.remove(sequence)
        if len(queue) % 100 == 0:
            queue.check()
    assert len(queue) == 1
    assert len(queue._heap) < 50
    assert drain(queue) == ["0"]


def test_the_tenant_that_was_served_least_goes_first():
    queue = FairQueue()
    for name in ("a1", "a2", "a3", "b1", "b2"):
        queue.push(waiting(name, tenant=name[0]))
    order = []
    for _ in range(5):
        sequence = queue.peek()
        order.append(sequence.request.new.request_id)
        queue.remove(sequence)
        queue.charge(sequence, 10, 0)
        queue.check()
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_output_tokens_weigh_more_than_prompt_tokens():
    queue = FairQueue()
    a, b = waiting("a", tenant="a"), waiting("b", tenant="b")
    queue.push(a)
    queue.push(b)
    queue.charge(a, 0, 6)
    queue.charge(b, 10, 0)
    assert queue.peek() is b
    assert (queue.counter("a"), queue.counter("b")) == (12, 10)


def test_idling_saves_up_no_credit():
    queue = FairQueue()
    busy = [waiting(f"a{i}", tenant="a") for i in range(3)]
    for sequence in busy:
        queue.push(sequence)
    queue.charge(busy[0], 1000, 0)
    newcomer = waiting("b", tenant="b")
    queue.push(newcomer)
    assert queue.counter("b") == 1000
    queue.charge(newcomer, 1, 0)
    assert queue.peek() is busy[0]


def test_an_empty_queue_remembers_the_last_tenant():
    queue = FairQueue()
    first = waiting("a", tenant="a")
    queue.push(first)
    queue.remove(first)
    queue.charge(first, 500, 0)
    queue.push(waiting("b", tenant="b"))
    assert queue.counter("b") == 500


def test_a_tenant_may_leave_and_come_back_while_its_entry_is_old():
    queue = FairQueue()
    a, b = waiting("a", tenant="a"), waiting("b", tenant="b")
    queue.push(a)
    queue.push(b)
    queue.remove(a)
    queue.charge(b, 50, 0)
    queue.push(a)
    queue.check()
    assert queue.counter("a") == 50
    assert drain(queue) == ["a", "b"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("prc"), st.sampled_from("abc"), st.integers(0, 9)), max_size=80))
def test_fair_takes_the_least_counter_whatever_happened(history):
    queue, present, index = FairQueue(), [], 0
    for verb, tenant, number in history:
        if verb == "p":
            present.append(waiting(str(index), tenant))
            queue.push(present[-1])
            index += 1
        elif verb == "r" and present:
            queue.remove(present.pop(number % len(present)))
        elif verb == "c" and present:
            queue.charge(present[number % len(present)], number, number)
        queue.check()
        sequence = queue.peek()
        assert (sequence is None) == (not present)
        if present:
            least = min(queue.counter(c.request.new.tenant) for c in present)
            assert queue.counter(sequence.request.new.tenant) == least
            same = [c for c in present if c.request.new.tenant == sequence.request.new.tenant]
            assert sequence is same[0]


def test_two_tenants_get_equal_shares_under_load():
    """Tenant a floods the queue; tenant b, who asks one thing at a time, is served as much."""
    queue = FairQueue()
    for i in range(200):
        queue.push(waiting(f"a{i}", tenant="a"))
    served = {"a": 0, "b": 0}
    queue.push(waiting("b", tenant="b"))
    for i in range(100):
        sequence = queue.peek()
        tenant = sequence.request.new.tenant
        queue.remove(sequence)
        queue.charge(sequence, 7, 11)
        served[tenant] += 1
        if tenant == "b":
            queue.push(waiting(f"b{i}", tenant="b"))
    assert served == {"a": 50, "b": 50}
