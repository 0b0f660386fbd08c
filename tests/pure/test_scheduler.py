"""What a step contains and what a commit gives, case by case."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runner import FakeRunner, Received, solo

from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.types import Failure, NewRequest, Output, RowResult, Step, StepResult

MAX_MODEL_LEN = 64


class Run:
    """A scheduler with a fake runner; checks every structure after every step."""

    def __init__(self, num_blocks=64, block_size=4, failing=(), groups=None, **limits) -> None:
        groups = [BlockGroup(num_blocks)] if groups is None else groups
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": MAX_MODEL_LEN} | limits
        self.scheduler = Scheduler(groups=groups, block_size=block_size, **limits)
        self.runner = FakeRunner(groups, block_size, frozenset(failing))
        self.received = Received(groups)
        self.requests: list[NewRequest] = []
        self.now = 0.0

    def add(self, name, prompt, max_tokens=4, **fields) -> NewRequest:
        own = {key: fields.pop(key) for key in NewRequest.__dataclass_fields__ if key in fields}
        prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        new = NewRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **fields), self.now, **own)
        self.requests.append(new)
        self.scheduler.add(new)
        return new

    def step(self, during=lambda: None) -> tuple[Step, list[Output]]:
        self.now += 1.0
        step = self.scheduler.schedule(self.now)
        during()
        outputs = self.scheduler.commit(step, self.runner.launch(step).result(), self.now + 0.5)
        self.received.take(outputs)
        self.scheduler.check()
        return step, outputs

    def abort(self, name, sequence=None) -> list[Output]:
        outputs = self.scheduler.abort(name, self.now + 0.5, sequence)
        self.received.take(outputs)
        self.scheduler.check()
        return outputs

    def finish(self) -> None:
        """Run to the end and compare every sequence with its solo output."""
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        assert self.scheduler.schedule(self.now) is None
        assert self.scheduler.num_free_blocks == self.runner.num_blocks
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        for new in self.requests:
            for sequence in range(new.params.n):
                self.received.verify(new, sequence, self.scheduler.max_model_len)


def shape(step: Step) -> list[tuple[int, int, int, bool]]:
    return [(row.slot, row.start, row.count, row.sample) for row in step.rows]


# Chunks and the budget


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples():
    run = Run(max_num_batched_tokens=10)
    new = run.add("a", 25)
    first, outputs = run.step()
    assert shape(first) == [(0, 0, 10, False)]
    assert first.rows[0].token_ids == new.prompt_token_ids
    assert first.admitted[0].num_prompt_tokens == 25
    assert outputs == []
    assert shape(run.step()[0]) == [(0, 10, 10, False)]
    third, outputs = run.step()
    assert shape(third) == [(0, 20, 5, True)]
    assert third.rows[0].token_ids == ()
    assert len(outputs[0].token_ids) == 1
    run.finish()


def test_running_requests_come_first_and_the_rest_of_the_budget_admits():
    run = Run(max_num_batched_tokens=10)
    run.add("a", 5)
    run.step()
    run.add("b", [7] * 12)
    step, _ = run.step()
    assert shape(step) == [(0, 5, 1, True), (1, 0, 9, False)]
    assert [a.request_id for a in step.admitted] == ["b"]
    run.finish()


def test_a_prompt_beside_those_who_generate_comes_in_smaller_chunks():
    run = Run(max_num_batched_tokens=24, max_num_prefill_tokens=5)

    def counts() -> list[int]:
        return [row.count for row in run.step()[0].rows]

    run.add("first", 30, max_tokens=4)
    assert [counts(), counts()] == [[24], [6]]  # nobody waits for a token
    run.add("second", range(100, 140), max_tokens=2)
    run.add("third", range(200, 203), max_tokens=2)
    assert [counts(), counts(), counts()] == [[1, 5], [1, 5], [1, 5]]
    assert counts() == [24]  # "first" has ended: again nobody waits
    assert counts() == [1, 3]
    run.finish()


def test_a_budget_below_the_number_of_rows_still_finishes_all():
    run = Run(max_num_batched_tokens=1)
    for name in "abcd":
        run.add(name, [ord(name), 1, 2])
    run.finish()


def test_no_more_than_max_num_seqs_run():
    run = Run(max_num_seqs=2)
    for name in "abc":
        run.add(name, [ord(name)])
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 1)
    run.finish()


def test_a_slot_is_released_and_admitted_again_in_one_step():
    run = Run(max_num_seqs=1)
    run.add("a", 3, max_tokens=1)
    run.add("b", 3)
    run.step()
    step, _ = run.step()
    assert step.released == (0,)
    assert [(a.slot, a.request_id) for a in step.admitted] == [(0, "b")]
    run.finish()


# The prefix cache


def test_a_prefix_hit_shares_full_blocks_and_leaves_the_last_token():
    run = Run()
    run.add("a", 12, max_tokens=1)
    first, _ = run.step()
    run.add("b", 12, max_tokens=1)
    step, outputs = run.step()
    assert shape(step) == [(0, 8, 4, True)]
    assert step.granted[0].block_ids[:2] == first.granted[0].block_ids[:2]
    assert outputs[0].num_cached_tokens == 8
    assert run.scheduler.num_cached_tokens == 8
    run.finish()


@pytest.mark.parametrize("fields", [{"cache_salt": "x"}, {"context_variant": 1}])
def test_salt_and_context_variant_keep_caches_apart(fields):
    run = Run()
    run.add("a", 12, max_tokens=1)
    run.step()
    run.add("b", 12, max_tokens=1, **fields)
    assert shape(run.step()[0]) == [(0, 0, 12, True)]
    run.add("c", 12, max_tokens=1, **fields)
    assert shape(run.step()[0]) == [(0, 8, 4, True)]
    run.finish()


def test_emitted_tokens_are_cached_too():
    run = Run()
    new = run.add("a", 6, max_tokens=8, ignore_eos=True)
    run.finish()
    both = new.prompt_token_ids + tuple(solo(new, 0, MAX_MODEL_LEN).token_ids)
    run.add("b", both)
    step, _ = run.step()
    assert step.rows[0].start == 12  # 13 positions were computed, 3 blocks are full
    run.finish()


def test_without_prefix_caching_nothing_is_found_later():
    run = Run(enable_prefix_caching=False)
    run.add("a", 12)
    run.step()
    run.add("b", 12)
    assert shape(run.step()[0])[1] == (1, 0, 12, True)
    run.finish()
    check_findable(run, 0)


def test_a_block_is_findable_only_after_its_step_was_committed():
    run = Run()
    run.add("a", 12)
    run.add("b", 12)
    step, _ = run.step(during=lambda: check_findable(run, 0))
    assert [row.start for row in step.rows] == [0, 0]  # both compute it
    check_findable(run, 3)
    run.finish()


def check_findable(run: Run, count: int) -> None:
    assert len(run.scheduler.caches.paged[0].pool._block_of) == count


def test_what_an_aborted_or_failed_row_computed_is_not_findable():
    run = Run(failing=["b"])
    run.add("a", 12)
    run.step(during=lambda: run.abort("a"))
    check_findable(run, 0)
    run.add("b", 12)
    run.step()
    check_findable(run, 0)
    run.finish()


# Preemption


def test_the_youngest_is_preempted_and_resumes_before_newer_ones():
    run = Run(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    run.add("old", [1] * 7, max_tokens=12, ignore_eos=True)
    run.add("young", [2] * 7, max_tokens=12, ignore_eos=True)
    run.add("newer", [3] * 4, max_tokens=1)
    while run.scheduler.num_preemptions == 0:
        step, _ = run.step()
    assert step.released == (1,)
    assert [row.slot for row in step.rows] == [0]
    order = []
    while run.scheduler.has_work:
        order += [a.request_id for a in run.step()[0].admitted]
    assert order == ["young", "newer"]
    run.finish()
    final = {key[0]: out for key, out in run.received.final.items()}
    assert final["old"].metrics.num_preemptions == 0
    assert final["young"].metrics.num_preemptions == 1


def test_an_admission_leaves_a_spare_block_for_each_that_runs():
    run = Run(num_blocks=6)
    run.add("a", [1] * 7, max_tokens=8)
    run.add("b", [2] * 13)
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_free_blocks) == (1, 4)  # b wants four
    run.finish()
    run = Run(num_blocks=7)
    run.add("a", [1] * 7, max_tokens=8)
    run.add("b", [2] * 13)
    run.step()
    assert run.scheduler.num_running == 2


def test_of_several_preempted_the_oldest_resumes_first():
    run = Run(num_blocks=6, num_spare_blocks=0, enable_prefix_caching=False)
    for name, token_id in (("old", 1), ("middle", 2), ("young", 3)):
        run.add(name, [token_id] * 7, max_tokens=12, ignore_eos=True)
    order = []
    while run.scheduler.has_work:
        order += [admission.request_id for admission in run.step()[0].admitted]
        if run.scheduler.num_running == 1 and run.scheduler.num_waiting == 2:
            order.append("both preempted")
            break
    while run.scheduler.has_work:
        order += [admission.request_id for admission in run.step()[0].admitted]
    assert order[:5] == ["old", "middle", "young", "both preempted", "middle"]


def test_a_resumed_request_carries_all_it_knows_and_finds_what_is_still_cached():
    run = Run(num_blocks=7)
    run.add("old", [1] * 7, max_tokens=12, ignore_eos=True)
    run.add("young", [2] * 7, max_tokens=12, ignore_eos=True)
    while run.scheduler.num_preemptions == 0:
        run.step()
    while not (step := run.step()[0]).admitted:
        pass
    row = next(row for row in step.rows if row.slot == step.admitted[0].slot)
    assert row.token_ids[:7] == (2,) * 7
    assert len(row.token_ids) > 7
    assert step.admitted[0].num_prompt_tokens == 7
    assert row.start > 0
    run.finish()
    final = run.received.final[("young", 0)]
    assert final.num_cached_tokens == 0  # what counts is the first admission
    assert (final.metrics.admitted_s, final.metrics.first_token_s) == (1.0, 1.5)


def test_a_head_that_does_not_fit_is_not_overtaken():
    run = Run(num_blocks=10)
    run.add("a", [1] * 20, max_tokens=8, ignore_eos=True)
    run.step()
    run.add("long", [2] * 24, max_tokens=1)
    run.add("short", [3], max_tokens=1)
    order = []
    while run.scheduler.has_work:
        order += [admission.request_id for admission in run.step()[0].admitted]
    assert order == ["long", "short"]


def test_a_head_that_does_not_fit_is_not_matched_anew_in_every_step():
    run = Run(num_blocks=10)
    run.add("a", [1] * 20, max_tokens=12, ignore_eos=True)
    run.step()
    run.add("long", [1] * 20 + [2] * 20, max_tokens=1)
    matched = []
    match = run.scheduler.caches.match
    run.scheduler.caches.match = lambda sequence: matched.append(sequence) or match(sequence)
    run.finish()
    assert 1 < len(matched) < 5


def test_a_head_that_does_not_fit_is_matched_again_when_its_prefix_was_cached_since():
    run = Run(num_blocks=14, max_num_batched_tokens=64)
    run.add("a", [1] * 32 + [2], max_tokens=12, ignore_eos=True)
    run.add("b", [1] * 32 + [3], max_tokens=12, ignore_eos=True)
    first, _ = run.step()
    assert [admission.request_id for admission in first.admitted] == ["a"]  # nine blocks each
    second, _ = run.step()
    assert [admission.request_id for admission in second.admitted] == ["b"]
    assert second.rows[-1].start == 32
    run.finish()


def test_a_head_that_does_not_fit_wants_less_once_others_use_its_cached_blocks():
    run = Run(num_blocks=14, num_spare_blocks=0, policy="priority")
    run.add("past", [1] * 32, max_tokens=1)
    run.finish()
    run.add("old", [2] * 22, max_tokens=3, ignore_eos=True)
    run.step()
    run.add("long", [1] * 33, max_tokens=1)  # nine blocks: eight that nobody holds, and a fresh one
    assert not run.step()[0].admitted
    run.add("short", [1] * 29, max_tokens=4, priority=-1, ignore_eos=True)
    admitted = [[admission.request_id for admission in run.step()[0].admitted] for _ in range(2)]
    assert admitted == [["short"], ["long"]]  # seven of the nine are in use now
    run.finish()


def test_a_lone_request_may_fill_the_whole_cache():
    run = Run(num_blocks=4)
    run.add("a", 12, max_tokens=5, ignore_eos=True)  # 17 known, 16 computed
    run.finish()
    assert run.scheduler.num_preemptions == 0


def test_what_can_never_fit_is_an_error_not_a_loop():
    run = Run(num_blocks=2)
    run.add("a", 9)
    with pytest.raises(RuntimeError, match="none of them fits"):
        run.scheduler.schedule(0.0)
    run = Run(num_blocks=2)
    run.add("a", 8, ignore_eos=True)
    run.step()
    with pytest.raises(RuntimeError, match="alone exceeds"):
        run.scheduler.schedule(0.0)


# Several sequences


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_share_the_blocks_of_their_prompt(caching):
    run = Run(max_num_batched_tokens=8, enable_prefix_caching=caching)
    run.add("a", 19, n=4, ignore_eos=True)
    step, _ = run.step()
    assert len(step.rows) == 1
    run.step()
    assert run.scheduler.num_waiting == 3
    third, _ = run.step()
    tables = [blocks for *_, blocks in (*step.granted, *third.granted)]
    step, _ = run.step()
    assert [(row.start, row.count) for row in step.rows] == [(19, 1), (16, 3), (16, 3), (16, 1)]
    tables += [blocks for *_, blocks in step.granted]
    assert len({table[:4] for table in tables}) == 1
    run.finish()
    assert run.runner.num_computed == 19 + 3 * 3 + 4 * 3


def test_siblings_go_before_the_queue():
    run = Run(max_num_seqs=4)
    run.add("a", 8, n=3)
    run.step()
    run.add("b", [9] * 4)
    step, _ = run.step()
    assert [(a.request_id, a.sequence) for a in step.admitted] == [("a", 1), ("a", 2), ("b", 0)]
    run.finish()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_siblings_run_when_the_first_sequence_is_aborted(num_steps, caching):
    run = Run(max_num_batched_tokens=8, enable_prefix_caching=caching)
    run.add("a", 19, n=3)
    for _ in range(num_steps):
        run.step()
    run.abort("a", 0)
    run.finish()
    assert run.received.final[("a", 0)].finish_reason == "abort"


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_run_when_the_first_sequence_ends_at_once(caching):
    run = Run(enable_prefix_caching=caching)
    run.add("a", 19, n=3, max_tokens=1)
    run.finish()


def test_every_sequence_reports_its_own_error():
    run = Run(failing=["a"])
    run.add("a", 9, n=3)
    run.add("b", 9, n=2)
    run.finish()
    errors = [out.error.message for out in run.received.final.values() if out.request_id == "a"]
    assert errors == ["logits are not numbers"] * 3


def test_a_preempted_first_sequence_does_not_strand_its_siblings():
    run = Run(num_blocks=8, max_num_batched_tokens=6)
    run.add("old", [1] * 7, max_tokens=20, ignore_eos=True)
    run.step()
    run.step()
    run.add("a", [2] * 18, n=3, max_tokens=4, ignore_eos=True)
    run.finish()
    assert run.scheduler.num_preemptions > 0


# Abort


def test_abort_of_waiting_running_and_ended_requests():
    run = Run(max_num_seqs=1)
    run.add("a", 5)
    run.add("b", 5)
    run.step()
    assert [out.finish_reason for out in run.abort("b")] == ["abort"]
    assert [out.finish_reason for out in run.abort("a")] == ["abort"]
    assert run.abort("a") == run.abort("b") == run.abort("unknown") == []
    run.finish()


def test_abort_ends_each_sequence_once_and_in_order():
    run = Run(max_num_batched_tokens=8)
    run.add("a", 5, n=4)
    run.step()
    run.step()
    assert [out.sequence for out in run.abort("a", 2)] == [2]
    assert run.abort("a", 2) == run.abort("a", 9) == run.abort("a", -1) == []
    assert [out.sequence for out in run.abort("a")] == [0, 1, 3]
    run.finish()


def test_the_result_of_a_row_aborted_in_flight_is_dropped():
    run = Run()
    run.add("a", 5)
    run.add("b", 5)
    _, outputs = run.step(during=lambda: run.abort("a"))
    assert [out.request_id for out in outputs] == ["b"]
    run.add("a", 6)  # the id is free again
    run.received = Received()
    step, _ = run.step()
    assert step.released == (0,)
    assert [a.slot for a in step.admitted] == [0]


# Ends


def scripted(tokens, results, max_model_len=MAX_MODEL_LEN, eos=(2,), **params) -> list[Output]:
    """The outputs of one request whose rows give `results`."""
    scheduler = Scheduler(
        groups=[BlockGroup(32)],
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
    )
    scheduler.add(NewRequest("a", tuple(tokens), SamplingParams(**params), eos_token_ids=eos))
    outputs = []
    for result in results:
        step = scheduler.schedule(0.0)
        assert step is not None, "it ended early"
        outputs += scheduler.commit(step, StepResult((RowResult(tuple(result)),)), 0.0)
        scheduler.check()
    return outputs


@pytest.mark.parametrize(
    ("results", "params", "expected"),
    [
        ([[5], [2]], {}, ("stop", None)),
        ([[5], [7]], {"stop_token_ids": (7,)}, ("stop", 7)),
        ([[5], [2]], {"stop_token_ids": (2,)}, ("stop", None)),
        ([[2], [2]], {"ignore_eos": True, "max_tokens": 2}, ("length", None)),
        ([[2]], {"ignore_eos": True, "stop_token_ids": (2,)}, ("stop", 2)),
        ([[5], [2]], {"max_tokens": 2}, ("stop", None)),
        ([[5], [7]], {"max_tokens": 2, "stop_token_ids": (7,)}, ("stop", 7)),
        ([[5], [6], [9]], {"max_tokens": 3}, ("length", None)),
        ([[2], [2], [2]], {"min_tokens": 2}, ("stop", None)),
        ([[2], [2]], {"min_tokens": 2, "max_tokens": 2}, ("length", None)),
        ([[7], [7]], {"min_tokens": 1, "stop_token_ids": (7,)}, ("stop", 7)),
        ([[5]] * 6, {"max_tokens": None, "max_model_len": 10}, ("length", None)),
        ([[5]] * 6, {"max_tokens": 50, "max_model_len": 10}, ("length", None)),
    ],
)
def test_why_a_request_ends(results, params, expected):
    outputs = scripted(range(10, 14), results, **params)
    assert [out.finish_reason for out in outputs[:-1]] == [None] * (len(results) - 1)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == expected
    assert [list(out.token_ids) for out in outputs] == results


def test_a_row_without_a_token_fails_its_request():
    (output,) = scripted([9], [[]])
    assert (output.finish_reason, output.error) == (
        "error",
        Failure("the device returned no token, or too many"),
    )


def test_metrics_tell_the_times():
    run = Run(max_num_seqs=1, max_num_batched_tokens=4)
    run.add("a", 6, max_tokens=3, ignore_eos=True)
    run.finish()
    metrics = run.received.final[("a", 0)].metrics
    assert (metrics.arrival_s, metrics.admitted_s) == (0.0, 1.0)
    assert (metrics.first_token_s, metrics.finished_s) == (2.5, 4.5)


# Logprobs of the prompt


def test_prompt_logprobs_are_gathered_over_chunks_and_come_once():
    run = Run(max_num_batched_tokens=4)
    run.add("a", 11, prompt_logprobs=0)
    run.finish()
    assert len(run.received.prompt_logprobs["a"]) == 10


def test_prompt_logprobs_take_no_cached_prefix():
    run = Run()
    run.add("a", 12, max_tokens=1)
    run.step()
    run.add("b", 12, prompt_logprobs=0, n=3)
    step, outputs = run.step()
    assert shape(step) == [(0, 0, 12, True)]
    assert len(outputs[0].prompt_logprobs) == 11
    step, _ = run.step()
    assert [row.start for row in step.rows] == [12, 8, 8]
    assert all(a.params.prompt_logprobs is None for a in step.admitted)  # not asked twice
    run.finish()


def test_prompt_logprobs_go_on_after_a_preemption():
    run = Run(num_blocks=9, max_num_batched_tokens=5, num_spare_blocks=0)
    run.add("old", [1] * 4, max_tokens=20, ignore_eos=True)
    run.step()
    run.add("a", [2, 3] * 13, prompt_logprobs=0, max_tokens=2, n=2)
    run.step()
    while run.scheduler.num_preemptions == 0:
        run.step()
    run.finish()
    assert len(run.received.prompt_logprobs["a"]) == 25


def test_a_sibling_takes_over_the_prompt_logprobs():
    run = Run(max_num_batched_tokens=8)
    run.add("a", 19, prompt_logprobs=0, n=2)
    run.step()
    run.abort("a", 0)
    step, _ = run.step()
    assert step.rows[0].start == 8  # what is known is neither asked nor computed again
    run.finish()
    assert len(run.received.prompt_logprobs["a"]) == 18


def test_missing_prompt_logprobs_fail_the_request():
    (output,) = scripted([7, 8, 9], [[3]], prompt_logprobs=1)
    assert output.error == Failure("the device returned too few prompt logprobs")


# Policies, in the scheduler


def test_fair_lets_a_newcomer_in_before_a_flood():
    run = Run(max_num_seqs=1, policy="fair")
    for i in range(4):
        run.add(f"a{i}", [i] * 4, tenant="a", ignore_eos=True)
    run.step()
    run.add("b", [9] * 4, tenant="b")
    order = []
    while run.scheduler.has_work:
        order += [a.request_id for a in run.step()[0].admitted]
    assert order == ["b", "a1", "a2", "a3"]
    assert run.scheduler._waiting._queue.counter("a") == 4 * (4 + 2 * 4)


def test_nobody_is_charged_for_being_preempted():
    run = Run(num_blocks=6, policy="fair", num_spare_blocks=0, enable_prefix_caching=False)
    run.add("old", [1] * 7, max_tokens=12, ignore_eos=True)
    run.add("young", [2] * 7, max_tokens=12, ignore_eos=True)
    run.finish()
    assert run.scheduler.num_preemptions > 0
    assert run.scheduler._waiting._queue.counter("") == 2 * (7 + 2 * 12)


def test_priority_decides_who_is_admitted():
    run = Run(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        run.add(name, [5], priority=priority)
    order = []
    while run.scheduler.has_work:
        order += [a.request_id for a in run.step()[0].admitted]
    assert order == ["c", "a", "b"]


# Misuse, determinism, many at once


def test_calls_out_of_turn_are_refused():
    run = Run()
    run.add("a", 5)
    with pytest.raises(ValueError, match="open already"):
        run.scheduler.add(run.requests[0])
    step = run.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="were not committed"):
        run.scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="1 rows asked, 0 results"):
        run.scheduler.commit(step, StepResult(()), 0.0)
    result = run.runner.launch(step).result()
    run.scheduler.commit(step, result, 0.0)
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        run.scheduler.commit(step, result, 0.0)


def crowd(policy="fcfs", caching=True, num_blocks=40, run=None) -> Run:
    """200 requests that share beginnings and fight for blocks, some of them aborted."""
    run = run or Run(
        num_blocks=num_blocks,
        num_spare_blocks=0,  # more preemptions
        max_num_seqs=12,
        max_num_batched_tokens=40,
        policy=policy,
        enable_prefix_caching=caching,
    )
    for i in range(200):
        prompt = [i % 3] * (i * 7 % 30) + [i % 5] * (1 + i % 4)
        fields = {"tenant": str(i % 4), "priority": i % 3, "eos_token_ids": (1,), "seed": i % 7}
        logprobs = 0 if i % 11 == 0 else None
        run.add(
            f"r{i}", prompt, max_tokens=3 + i * 5 % 28, n=1 + (i % 6 == 0), prompt_logprobs=logprobs, **fields
        )
        if i % 2:
            run.step()
        if i % 17 == 0:
            run.abort(f"r{i * 3 // 4}")
    return run


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_crowd_gets_what_each_would_get_alone(policy, caching):
    run = crowd(policy, caching)
    run.finish()
    assert run.scheduler.num_preemptions > 20
    assert (run.scheduler.num_cached_tokens > 1000) or not caching


def test_the_same_calls_give_the_same_steps_in_every_process():
    code = "import hashlib, test_scheduler as t\nrun = t.crowd()\nplans = []\n"
    code += "while run.scheduler.has_work: plans.append(repr(run.step()[0]))\n"
    code += "print(hashlib.sha256(''.join(plans).encode()).hexdigest())"
    digests = set()
    for seed in "12":
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, env=env, capture_output=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


# Size


def traced(function, trace, *arguments):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*arguments)
    finally:
        sys.settrace(before)


def lines_of_a_step(num_waiting: int, num_blocks: int, policy: str) -> int:
    """Lines of Python that one decode step of four rows executes: a measure of time without a clock."""
    run = Run(num_blocks=num_blocks, max_num_seqs=4, policy=policy)
    for i in range(4):
        run.add(f"running{i}", [i] * 6, max_tokens=50, ignore_eos=True)
    run.step()
    for i in range(num_waiting):
        run.add(f"waiting{i}", [9] * 6, tenant=str(i % 10), priority=i % 3)
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()  # it would run finalizers of other tests, whose lines are not the scheduler's
    try:
        step = traced(run.scheduler.schedule, trace, 0.0)
        result = run.runner.launch(step).result()
        traced(run.scheduler.commit, trace, step, result, 0.0)
    finally:
        gc.enable()
    return count


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_step_does_not_grow_with_the_queue_or_the_pool(policy):
    small = lines_of_a_step(10, 50, policy)
    assert lines_of_a_step(3000, 50, policy) == lines_of_a_step(10, 5000, policy) == small < 400
