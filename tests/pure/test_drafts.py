"""Drafted tokens: verified with the next row, kept as far as they are right, and never at others' cost."""

from __future__ import annotations

import pytest
from fake_runner import solo, text
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Run, check_findable
from test_steps_in_flight import Ahead

from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.types import Drafting, Failure, NewRequest, Output, RowResult, StepResult


def expected(run: Run, name: str = "a") -> list[int]:
    """All tokens that a request will be given."""
    (new,) = (new for new in run.requests if new.request_id == name)
    return solo(new, 0, run.scheduler.max_model_len, run.runner.groups).token_ids


def test_right_guesses_come_as_tokens_of_one_step():
    run = Run()
    run.add("a", 6, max_tokens=8, ignore_eos=True)
    run.step()
    tokens = expected(run)
    assert run.scheduler.draft("a", 0, text(tokens[1:4]))
    step, outputs = run.step()
    (row,) = step.rows
    assert (row.start, row.count, row.num_logits, row.drafted) == (6, 4, 4, tuple(tokens[1:4]))
    assert outputs[0].token_ids == tuple(tokens[1:5])
    assert run.step()[0].rows[0].start == 10
    run.finish()


def test_what_follows_a_wrong_guess_is_computed_again():
    run = Run()
    run.add("a", 6, max_tokens=8, ignore_eos=True)
    run.step()
    tokens = expected(run)
    wrong = (tokens[2] + 1) % 23
    run.scheduler.draft("a", 0, text([tokens[1], wrong, tokens[3]]))
    _, outputs = run.step()
    assert outputs[0].token_ids == tuple(tokens[1:3])
    assert run.step()[0].rows[0][1:3] == (8, 1)
    run.finish()


def test_blocks_are_findable_up_to_what_was_accepted():
    run = Run()
    run.add("a", 7, max_tokens=12, ignore_eos=True)
    run.step()
    tokens = expected(run)
    check_findable(run, 1)
    run.scheduler.draft("a", 0, text([(tokens[1] + 1) % 23] * 6))  # positions 7 ... 13: two blocks more
    run.step()
    check_findable(run, 2)
    run.scheduler.draft("a", 0, text(tokens[2:7]))
    run.step()
    check_findable(run, 3)
    run.finish()


def test_drafts_are_cut_to_the_length_the_budget_and_the_room():
    run = Run()
    run.add("a", 6, max_tokens=4, ignore_eos=True)
    run.step()
    run.scheduler.draft("a", 0, text([0] * 9))
    assert len(run.step()[0].rows[0].drafted) == 2  # and a token that follows
    run.finish()
    run = Run(max_num_batched_tokens=6)
    for name in "abc":
        run.add(name, [ord(name)], max_tokens=9, ignore_eos=True)
    run.step()
    for name in "abc":
        run.scheduler.draft(name, 0, text([0] * 9))
    assert [row.count for row in run.step()[0].rows] == [4, 1, 1]
    run.finish()
    run = Run(num_blocks=5, num_spare_blocks=0)
    run.add("a", [1] * 5, max_tokens=9, ignore_eos=True)
    run.add("b", [2] * 9, max_tokens=3, ignore_eos=True)
    run.step()
    run.scheduler.draft("a", 0, text([0] * 5))
    step, _ = run.step()
    assert [row.count for row in step.rows] == [3, 1]  # to the end of its block; none is free, none is taken
    assert run.scheduler.num_preemptions == 0
    run.finish()


def test_a_draft_waits_for_the_row_that_samples():
    run = Run(max_num_batched_tokens=8)
    run.add("a", 12, max_tokens=6, ignore_eos=True)
    run.step()
    assert run.scheduler.draft("a", 0, text(expected(run)[:2]))
    step, outputs = run.step()
    assert (step.rows[0].start, step.rows[0].count) == (8, 6)
    assert len(outputs[0].token_ids) == 3
    run.finish()


def test_who_cannot_be_drafted_for():
    run = Ahead(max_num_seqs=1)
    run.add("a", 6)
    run.add("waiting", 6)
    run.plan()
    for name, sequence in (("a", 0), ("a", 1), ("a", -1), ("waiting", 0), ("unknown", 0)):
        assert not run.scheduler.draft(name, sequence, text([1]))
    run.collect()
    assert run.scheduler.draft("a", 0, text([1]))
    run.finish()


def test_nothing_is_planned_ahead_of_a_draft():
    run = Ahead()
    run.add("a", 6, max_tokens=9, ignore_eos=True)
    run.add("b", 7, max_tokens=9, ignore_eos=True)
    run.plan()
    run.collect()
    run.scheduler.draft("a", 0, text([1, 2]))
    run.plan()
    assert run.plan() is None
    run.collect()
    run.plan()
    assert run.plan() is not None
    run.finish()


def test_an_aborted_or_preempted_sequence_forgets_its_draft():
    run = Run()
    run.add("a", 6, max_tokens=9, ignore_eos=True)
    run.step()
    run.scheduler.draft("a", 0, text([1, 2]))
    run.scheduler._preempt(run.scheduler._requests["a"].sequences[0], 0.0)
    step, _ = run.step()
    assert step.rows[0].drafted == ()
    run.finish()


def test_logprobs_of_the_prompt_come_beside_a_draft():
    run = Run(max_num_batched_tokens=8)
    run.add("a", 12, prompt_logprobs=0, max_tokens=6, ignore_eos=True)
    run.step()
    run.scheduler.draft("a", 0, text(expected(run)[:2]))
    step, _ = run.step()
    assert step.rows[0].num_logits == step.rows[0].count == 6
    run.finish()


def scripted(results, drafts, **params) -> list[Output]:
    """The outputs of one request whose rows verify `drafts` and give `results`."""
    scheduler = Scheduler(
        groups=[BlockGroup(32)], block_size=4, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64
    )
    scheduler.add(NewRequest("a", (9,), SamplingParams(**params), eos_token_ids=(2,)))
    outputs = []
    for result, draft in zip(results, drafts, strict=True):
        if draft:
            assert scheduler.draft("a", 0, text(draft))
        step = scheduler.schedule(0.0)
        outputs += scheduler.commit(step, StepResult((RowResult(tuple(result)),)), 0.0)
        scheduler.check()
    return outputs


@pytest.mark.parametrize(
    ("params", "kept", "finish_reason"),
    [
        ({}, (6, 2), "stop"),
        ({"max_tokens": 4}, (6, 2), "stop"),
        ({"max_tokens": 4, "ignore_eos": True}, (6, 2, 7), "length"),
        ({"min_tokens": 3}, (6, 2, 7), None),
        ({"stop_token_ids": (6,)}, (6,), "stop"),
    ],
)
def test_accepted_tokens_end_a_sequence_where_single_ones_would(params, kept, finish_reason):
    outputs = scripted([[3], [6, 2, 7]], [[], [6, 2, 8]], **params)
    assert outputs[1].token_ids == kept
    assert outputs[1].finish_reason == finish_reason


def test_more_tokens_than_were_asked_for_fail_the_request():
    _, output = scripted([[3], [4, 5]], [[], []])
    assert output.error == Failure("the device returned no token, or too many")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 22), max_size=6), max_size=40),
    st.lists(st.integers(0, 6), max_size=40),
    st.integers(1, 12),
    st.sampled_from(
        [[BlockGroup(12)], [BlockGroup(12), BlockGroup(9, 5)], [BlockGroup(12), StateGroup(3, 2)]]
    ),
)
def test_outputs_are_the_same_whatever_is_drafted(guesses, num_right, budget, groups):
    run = Run(groups=groups, max_num_batched_tokens=budget, num_spare_blocks=0)
    run.add("a", 9, max_tokens=14, eos_token_ids=(3,))
    run.add("b", [4, 5] * 4, max_tokens=14, n=2, prompt_logprobs=0)
    for guess, right in zip(guesses, num_right, strict=False):
        if run.scheduler.has_work:
            run.step()
        for sequence in list(run.scheduler._running.values()):
            new = sequence.request.new
            tokens = solo(new, sequence.index, 64, groups).token_ids[len(sequence.emitted) :]
            run.scheduler.draft(new.request_id, sequence.index, text(tokens[:right] + guess))
    run.finish()


def test_a_request_that_asks_is_told_what_was_drafted_for_it():
    run = Run()
    run.add("a", 6, max_tokens=8, ignore_eos=True, report_drafting=True)
    run.add("b", 7, max_tokens=8, ignore_eos=True)
    _, outputs = run.step()
    nothing = Drafting(expected_tokens=1.0, why_none="nothing proposed")
    assert [output.drafting for output in outputs] == [nothing, None]
    tokens, others = expected(run), expected(run, "b")
    drafted = (*tokens[1:3], (tokens[3] + 1) % 23, tokens[4])
    run.scheduler.draft("a", 0, text(drafted))
    run.scheduler.draft("b", 0, text(others[1:3]))
    _, outputs = run.step()
    assert outputs[0].drafting == Drafting(*text(drafted), 2)
    assert outputs[1].drafting is None
    run.finish()


def test_the_token_that_ends_an_answer_counts_as_its_own():
    free = Run()
    free.add("a", 6, max_tokens=8, ignore_eos=True)
    tokens = expected(free)
    assert tokens[2] not in tokens[:2]
    run = Run()
    run.add("a", 6, max_tokens=8, stop_token_ids=(tokens[2],), report_drafting=True)
    run.step()
    run.scheduler.draft("a", 0, text(tokens[1:6]))
    _, (output,) = run.step()
    assert output.finish_reason == "stop"
    assert output.drafting.num_accepted == 1
    assert run.scheduler.verified.num_accepted == output.metrics.num_accepted == 1
    run.finish()
