"""Epochs: a scheduler that takes over the state at the beginning of one plans what the other one plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_runner import FakeRunner

from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.engine.epoch_state import Epoch, EpochRequest
from quire.engine.epochs import EpochScheduler
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output

PROMPT = tuple(range(1, 13))


class Run:
    """A scheduler and its device."""

    def __init__(
        self, groups: tuple[Group, ...] = (BlockGroup(40),), num_steps: int = 0, **limits: Any
    ) -> None:
        self.options = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 60, **limits}
        self.groups = groups
        self.scheduler = EpochScheduler(groups=groups, block_size=4, **self.options)
        self.runner = FakeRunner(groups, 4)
        self.runner.num_steps = num_steps
        self.now = 100.0

    def add(self, name: str, prompt: tuple[int, ...] = PROMPT, tenant: str = "", **params: Any) -> None:
        params = SamplingParams(**{"max_tokens": 6, "seed": 1, "ignore_eos": True, **params})
        self.scheduler.add(NewRequest(name, prompt, params, self.now, tenant=tenant))

    def step(self) -> tuple[Any, list[Output]]:
        self.now += 1
        step = self.scheduler.schedule(self.now)
        assert step is not None
        outputs = self.scheduler.commit(step, self.runner.launch(step).result(), self.now + 0.5)
        self.scheduler.check()
        return step, outputs

    def twin(self) -> tuple[Run, Epoch]:
        """Begin an epoch; return another scheduler with the state at its beginning, on a new device."""
        epoch = self.scheduler.begin_epoch(self.now)
        self.scheduler.check()
        twin = Run(self.groups, epoch.num_steps, **self.options)
        twin.now = self.now
        twin.scheduler.restore(epoch)
        twin.scheduler.check()
        return twin, epoch

    def finish_with(self, twin: Run, epoch: Epoch) -> int:
        """Compare all further steps and outputs, receipts included; return the number of tokens."""
        num_tokens, released = 0, epoch.released
        while self.scheduler.has_work:
            (own, outputs), (other, others) = self.step(), twin.step()
            assert own == replace(other, released=released + other.released)
            assert outputs == others
            num_tokens += sum(len(output.token_ids) for output in outputs)
            released = ()
        assert not twin.scheduler.has_work
        return num_tokens


def test_an_epoch_holds_what_runs_and_what_waits():
    run = Run(max_num_seqs=2)
    for name in "abcd":
        run.add(name)
    for _ in range(3):
        run.step()
    twin, epoch = run.twin()
    assert epoch.first == (("a", 0), ("b", 0))
    assert epoch.queued == (("c", 0), ("d", 0))
    assert epoch.released == (0, 1) or epoch.released == (1, 0)
    assert [len(request.sequences[0].emitted) for request in epoch.requests] == [3, 2, 0, 0]
    assert run.finish_with(twin, epoch) == 4 * 6 - 5


def test_an_epoch_changes_no_token():
    plain, interrupted = Run(), Run()
    tokens: list[dict[str, list[int]]] = [{}, {}]
    for run, found in zip((plain, interrupted), tokens, strict=True):
        for number, name in enumerate("abc"):
            run.add(name, PROMPT[number:], n=2)
        while run.scheduler.has_work:
            if run is interrupted:
                run.scheduler.begin_epoch(run.now)
            for _ in range(3):
                if run.scheduler.has_work:
                    for out in run.step()[1]:
                        found.setdefault(f"{out.request_id}{out.sequence}", []).extend(out.token_ids)
    assert interrupted.scheduler.num_preemptions > 3
    assert tokens[0] == tokens[1]


def test_sequences_that_wait_for_the_prompt_wait_again():
    run = Run(max_num_batched_tokens=5)
    run.add("a", n=3)
    run.step()
    twin, epoch = run.twin()
    assert [(one.number, one.follows) for one in epoch.requests[0].sequences] == [
        (0, False),
        (1, True),
        (2, True),
    ]
    assert run.finish_with(twin, epoch) == 18


def test_a_sequence_that_ended_stays_ended():
    run = Run()
    run.add("a", n=3)
    run.step()
    run.step()
    run.scheduler.abort("a", run.now, 1)
    twin, epoch = run.twin()
    assert [one.number for one in epoch.requests[0].sequences] == [0, 2]
    assert twin.scheduler.abort("a", run.now, 1) == []
    run.finish_with(twin, epoch)


@pytest.mark.parametrize(("budget", "num_steps"), [(12, 2), (6, 3)])
def test_logprobs_of_a_prompt_are_computed_again(budget: int, num_steps: int):
    """One has all or some of them; when it is admitted again, the other one has computed the same prompt."""
    run = Run(max_num_batched_tokens=budget)
    run.add("older", max_tokens=20)
    run.add("scored", prompt_logprobs=0)
    for _ in range(num_steps):
        run.step()
    assert run.scheduler.num_running == 2
    twin, epoch = run.twin()
    assert epoch.requests[1].owes_prompt_logprobs
    run.finish_with(twin, epoch)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_order_of_a_queue_is_kept(policy: str):
    run = Run(max_num_seqs=1, policy=policy)
    for number, name in enumerate("abcdef"):
        run.add(name, PROMPT[: 3 + 2 * number], tenant="xyz"[number % 3])
    for _ in range(9):
        run.step()
    twin, epoch = run.twin()
    run.add("late", tenant="x")
    twin.now = run.now
    twin.add("late", tenant="x")
    assert run.finish_with(twin, epoch) > 20
    assert bool(epoch.tenants) == (policy == "fair")


@pytest.mark.parametrize("groups", [(StateGroup(4, 1), BlockGroup(40)), (BlockGroup(40, 5), BlockGroup(40))])
def test_windows_and_states_are_computed_again(groups: tuple[Group, ...]):
    run = Run(groups)
    for name in "abc":
        run.add(name, n=2)
    for _ in range(4):
        run.step()
    twin, epoch = run.twin()
    run.finish_with(twin, epoch)


def test_no_epoch_begins_while_a_step_is_in_flight():
    run = Run()
    run.add("a")
    assert run.scheduler.schedule(1.0) is not None
    with pytest.raises(RuntimeError, match="between steps"):
        run.scheduler.begin_epoch(1.0)


def changed(epoch: Epoch, **fields: Any) -> Epoch:
    """The epoch, with other values of a field of it or of its first request."""
    if "requests" in fields or not set(fields) <= set(EpochRequest._fields):
        return epoch._replace(**fields)
    return epoch._replace(requests=(epoch.requests[0]._replace(**fields), *epoch.requests[1:]))


@pytest.mark.parametrize(
    "fields",
    [
        {"first": ()},
        {"first": (("a", 0), ("a", 0))},
        {"first": (("b", 0),)},
        {"requests": ()},
        {"sequences": ()},
    ],
)
def test_a_state_that_cannot_be_is_refused(fields: dict[str, Any]):
    run = Run()
    run.add("a")
    run.step()
    epoch = run.scheduler.begin_epoch(1.0)
    with pytest.raises(ValueError, match="not those"):
        Run().scheduler.restore(changed(epoch, **fields))


def test_a_sequence_beyond_its_length_is_refused():
    run = Run()
    run.add("a")
    run.step()
    epoch = run.scheduler.begin_epoch(1.0)
    (one,) = epoch.requests[0].sequences
    with pytest.raises(ValueError, match="reached its length"):
        Run().scheduler.restore(changed(epoch, sequences=(one._replace(emitted=(1,) * 6),)))
