"""Speculation: which drafts are verified and how much of them, when it stops, and what it costs."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from fake_runner import solo
from hypothesis import given, settings
from hypothesis import strategies as st
from test_steps_in_flight import Ahead

from quire.engine.acceptance import LEAST_CHANCE, Acceptance
from quire.engine.draft_lengths import LATER, StepBounds, choose_lengths
from quire.engine.draft_worth import LONGEST_PAUSE, DraftHistory
from quire.engine.step_law import Stage, StepLaw
from quire.engine.verify_times import VerifyTimes
from quire.program.features import LEADING, Feature
from quire.roofline.drafting import DraftPasses, LookingTime
from quire.types import Draft, Row, Step

FEATURES = (
    *LEADING,
    Feature("tiles", 4),
    Feature("positions"),
    Feature("pairs"),
    Feature("experts", 0, 2, 8),
)
NOTHING = (0.0,) * len(FEATURES)


def make_law(
    token_s: float, read_s: float = 1.0, tile_s: float = 0.0, step_s: float = 0.0, **fields: float
) -> StepLaw:
    """Reading takes `read_s`, or tokens and tiles of four `token_s` and `tile_s` each, if that is longer."""
    products = Stage((read_s, *NOTHING[1:]), (0.0, 0.0, token_s, 0.0, tile_s, *NOTHING[5:]))
    attention = Stage((*NOTHING[:5], 1e-6, 0.0, 1e-3), NOTHING)
    return StepLaw(FEATURES, (products, attention), (step_s, *NOTHING[1:]), (products,), tail=1.0, **fields)


FREE, COSTLY = make_law(0.01), make_law(1.0)  # a hundred tokens take as long as one; each takes as long


class Texts(Ahead):
    """Answers with drafts: for each sequence some right tokens, then wrong ones."""

    def __init__(self, law: StepLaw | None = FREE, max_steps_in_flight: int = 1, **limits) -> None:
        limits = {"max_num_batched_tokens": 64, "num_blocks": 200, **limits}
        super().__init__(max_steps_in_flight=max_steps_in_flight, speculation=True, **limits)
        if law is not None:
            self.scheduler.calibrate(law)
        self.num_right: dict[str, int] = {}  # of requests for which there are drafts
        self.num_wrong = 4
        self.match = 8
        self.alone: dict[str, list[int]] = {}

    def add(self, name, prompt, num_right=None, max_tokens=40, **fields):
        if num_right is not None:
            self.num_right[name] = num_right
        new = super().add(name, prompt, max_tokens, **{"ignore_eos": True} | fields)
        self.alone[name] = solo(new, 0, self.scheduler.max_model_len, self.runner.groups).token_ids
        return new

    def plan(self):
        for name, index in () if self.in_flight else self.scheduler.drafting():
            if name in self.num_right:
                known = len(self.received.token_ids.get((name, index), ()))
                right = self.alone[name][known : known + self.num_right[name]]
                after = self.alone[name][known + len(right) :][: self.num_wrong]
                wrong = [(token_id + 1) % 23 for token_id in after]
                self.scheduler.draft(name, index, (Draft((*right, *wrong), "text", self.match),))
        return super().plan()

    def drafted(self, count: int) -> list[list[int]]:
        """How many tokens each row of the next steps verifies."""
        return [[len(row.drafted) for row in self.step()[0].rows] for _ in range(count)]


# The lengths


def falling(rng) -> st.SearchStrategy[list[float]]:
    return st.lists(rng, max_size=5).map(lambda found: sorted(found, reverse=True))


chances = st.lists(falling(st.floats(0.01, 0.99)), min_size=1, max_size=3)
stairs = st.builds(
    lambda base, token, tile, size: lambda m: base + token * m + tile * -(-m // size),
    st.floats(0.5, 2.0), st.floats(0.0, 0.5), st.floats(0.0, 1.0), st.integers(1, 4),
)  # fmt: skip


def rate(found, lengths, num_others, seconds, added_s=0.0):
    expected = sum(1 + sum(row[:n]) for row, n in zip(found, lengths, strict=True)) + num_others
    return expected / (seconds(sum(lengths)) + added_s)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chances, st.integers(0, 2), stairs, st.integers(0, 12), st.floats(0.0, 0.5))
def test_no_other_lengths_give_more_tokens_in_their_time(found, num_others, seconds, most, between_s):
    bounds = StepBounds(1e9, 0.0, between_s, math.inf)  # nothing is too late
    lengths = choose_lengths(found, num_others, seconds, most, bounds)
    assert sum(lengths) <= most
    best = max(
        rate(found, other, num_others, seconds, between_s)
        for other in product(*(range(len(row) + 1) for row in found))
        if sum(other) <= most
    )
    assert rate(found, lengths, num_others, seconds, between_s) == pytest.approx(best, rel=1e-12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chances, st.integers(0, 2), stairs, st.floats(0.0, 0.2), st.floats(1.0, 3.0))
def test_nobody_is_later_than_allowed_and_one_row_gets_the_best_that_is(
    found, others, seconds, lost_s, limit
):
    bounds = StepBounds(seconds(0), lost_s, 0.0, limit)
    lengths = choose_lengths(found, others, seconds, 99, bounds)

    def allowed(lengths):
        least = 1.0 if others else min(1 + sum(row[:n]) for row, n in zip(found, lengths, strict=True))
        step_s = seconds(sum(lengths))
        return step_s <= limit and step_s + lost_s <= LATER * seconds(0) * least * (1 + 1e-12)

    assert not any(lengths) or allowed(lengths)
    if len(found) == 1:
        choices = [[n] for n in range(len(found[0]) + 1) if not n or allowed([n])]
        best = max(rate(found, one, others, seconds, lost_s) for one in choices)
        assert rate(found, lengths, others, seconds, lost_s) == pytest.approx(best, rel=1e-12)


def test_a_stair_is_looked_beyond():
    seconds = [1.0, 1.8, 1.8, 1.8, 1.8].__getitem__
    assert choose_lengths([[0.7, 0.7, 0.7, 0.7]], 0, seconds, 9, StepBounds(1.0, 0.0, 0.0, 9.0)) == [4]


@pytest.mark.parametrize("law", [FREE, COSTLY, make_law(0.2, tile_s=0.3)])
def test_kept_times_are_those_of_the_steps(law):
    times = VerifyTimes()
    times.calibrate(law, None)
    rows = [Row(0, 64, 1), Row(1, 64, 1), Row(2, 768, 40, sample=False, num_logits=0)]
    found = times.of(rows)
    for total in range(9):
        counts = [(64, 1 + -(-total // 2)), (64, 1 + total // 2), (768, 40)]
        expected = law.seconds(law.values(counts, 3 + total))
        assert found.seconds(total) == pytest.approx(expected, rel=1e-5)
    assert found is times.of([row._replace(start=row.start + 3) for row in rows])


# Acceptance


def test_only_what_was_reached_is_evidence_for_what_is_as_well_supported():
    acceptance, history = Acceptance(), DraftHistory()

    def chances(source):
        return [acceptance.expected(source, support, 1, 1.0)[0] for support in range(10)]

    before, stored = chances("text"), chances("store")
    for _ in range(200):
        acceptance.learn("text", 5, 2, 3, history)  # of support 5 and 6 right, of 7 wrong, of 8 unknown
    after = chances("text")
    assert min(after[5:7]) > 0.97 > 0.1 > after[7]
    assert (after[:5], after[8:], chances("store")) == (before[:5], before[8:], stored)


def test_tokens_after_an_unlikely_one_are_left_out():
    acceptance = Acceptance()
    found = acceptance.expected("text", 1, 32, 1.0)
    assert min(found[:-1]) >= LEAST_CHANCE > found[-1] > 0
    assert len(acceptance.expected("text", 1, 32, 0.01)) == 1


def test_estimates_follow_a_change():
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.learn("model", 0, 1, 1, DraftHistory())
    assert acceptance.expected("model", 0, 1, 1.0)[0] > 0.97
    for _ in range(300):
        acceptance.learn("model", 0, 0, 1, DraftHistory())
    assert acceptance.expected("model", 0, 1, 1.0)[0] < 0.15


def test_a_sequence_has_a_factor_of_its_own():
    acceptance, good, bad = Acceptance(), DraftHistory(), DraftHistory()
    for _ in range(20):
        acceptance.learn("text", 4, 2, 2, good)
        acceptance.learn("text", 4, 0, 1, bad)
    assert good.factor("text") > 1.0 > 0.4 > bad.factor("text")
    assert good.factor("model") == 1.0


# What is drafted


def test_tokens_that_cost_nothing_are_drafted_and_costly_ones_are_not():
    cheap, costly = Texts(FREE), Texts(COSTLY)
    for run in (cheap, costly):
        run.add("a", 9, num_right=6)
        run.step()
    assert min(map(sum, cheap.drafted(4))) >= 5
    assert costly.drafted(20) == [[0]] * 20
    cheap.finish()
    costly.finish()


def test_the_longer_the_match_the_longer_the_draft():
    lengths = []
    for match in (1, 3, 8, 20):
        run = Texts(make_law(0.3, read_s=0.3, step_s=0.7))
        run.match = match
        run.add("a", 9, num_right=12)
        run.step()
        lengths += run.drafted(1)[0]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_a_draft_waits_for_the_row_that_samples_through_many_steps():
    run = Texts(max_num_batched_tokens=1)
    run.add("a", 50, max_tokens=9)
    for _ in range(52):
        run.step()
        run.scheduler.draft("a", 0, (Draft((1, 2), "text", 1),))
    run.finish()


def test_tokens_after_a_wrong_one_are_no_evidence():
    run = Texts(FREE)
    run.num_wrong = 6
    run.add("a", 9, num_right=1)
    before = run.scheduler._speculation.begin_epoch([]).acceptance.text
    while run.scheduler.has_work:
        run.step()
    after = run.scheduler._speculation.begin_epoch([]).acceptance.text
    assert [i for i, one in enumerate(after) if one != before[i]] == [
        7,
        8,
    ]  # of support 8, right, and 9, wrong
    assert run.received.final["a", 0].metrics.num_drafted > 40


def test_without_a_law_few_rows_draft_a_little():
    run = Texts(None)
    for name in "abcd":
        run.add(name, [ord(name)] * 3, num_right=9)
    run.step()
    assert all(0 < sum(row) <= 12 for row in run.drafted(3))
    run.add("e", [5] * 3)
    run.step()
    assert run.drafted(1) == [[0] * 5]
    run.finish()


def test_one_without_drafts_keeps_others_from_making_it_wait():
    law = make_law(0.1, read_s=0.7)
    alone, beside = Texts(law), Texts(law)
    for run in (alone, beside):
        run.add("a", 9, num_right=9)
    beside.add("b", [7] * 3)
    for run in (alone, beside):
        run.step()
    plain_s = law.seconds(law.values([(9, 1), (3, 1)], 2))
    for lengths in beside.drafted(5):
        drafted_s = law.seconds(law.values([(9, 1 + lengths[0]), (3, 1)], 2 + lengths[0]))
        assert drafted_s <= LATER * plain_s * 1.01  # contexts are predicted by bucket
    assert sum(map(sum, alone.drafted(5))) > 20
    alone.finish()
    beside.finish()


def test_a_goal_for_the_time_between_tokens_bounds_drafts():
    law = make_law(0.15, read_s=0.15, step_s=0.85)
    lengths = []
    for goal in (None, law.seconds(law.values([(9, 5)], 5)) + 0.01):
        run = Texts(law, itl_goal_s=goal)
        run.num_wrong = 0
        run.add("a", 9, num_right=12)
        run.step()
        lengths.append(max(map(max, run.drafted(3))))
        run.finish()
    assert lengths[0] > 4 >= lengths[1] > 0


def test_drafts_take_no_blocks_from_who_waits():
    run = Texts(num_blocks=11, num_spare_blocks=0, max_num_seqs=1)
    run.add("a", 7, num_right=9, max_tokens=12)
    run.step()
    run.add("b", [9] * 30, max_tokens=4)
    assert len(run.step()[0].rows[0].drafted) < 9  # eight blocks are for "b"
    run.finish()


def test_what_is_always_wrong_is_drafted_ever_less_and_tried_again():
    run = Texts(make_law(0.3, read_s=0.5), max_model_len=1000, num_blocks=300)
    run.add("a", 9, num_right=0, max_tokens=900)
    run.step()
    lengths = [sum(found) for found in run.drafted(600)]
    assert sum(lengths[:30]) > 3 * sum(lengths[300:330])
    assert sum(lengths) < 60
    assert any(lengths[300:])
    run.num_right["a"], run.num_wrong = 9, 0  # the text begins to repeat
    num_left, num_steps = run.scheduler._requests["a"].max_known - 610, 0
    while run.scheduler.has_work:
        run.step()
        num_steps += 1
    assert num_steps < 0.7 * num_left


def test_costly_probes_are_rare():
    """In a step in which one more token takes a half longer, less than one of a hundred may."""
    run = Texts(make_law(0.5, read_s=0.1), max_model_len=1000, num_blocks=300)
    run.match = 1
    run.add("a", 9, num_right=0, max_tokens=900)
    run.step()
    assert sum(sum(found) > 0 for found in run.drafted(800)) < 8


# Looking for drafts


def test_a_step_waits_for_tokens_to_draft_from_only_while_that_pays():
    run = Texts(FREE._replace(drafting_s=0.2), max_steps_in_flight=2)
    run.add("a", 9, num_right=5)
    run.step()
    ahead = 0
    while run.scheduler.has_work or run.in_flight:
        run.step()
        ahead += len(run.in_flight)
    assert ahead <= 4  # so that the cost of looking is known
    hopeless = Texts(FREE._replace(drafting_s=0.2), max_steps_in_flight=2, max_model_len=1000, num_blocks=300)
    hopeless.add("a", 9, max_tokens=900)
    planned = []
    for _ in range(800):
        hopeless.step()
        planned.append(len(hopeless.in_flight))
    assert sum(planned[20:]) > 0.95 * len(planned[20:])
    waited = [i for i, count in enumerate(planned[20:]) if not count]
    assert max(b - a for a, b in pairwise(waited)) <= LONGEST_PAUSE + 8


def test_a_probe_waits_for_a_row_that_samples():
    """Its time may come while those that have drafts compute their prompts."""
    run = Texts(max_num_batched_tokens=8)
    run.scheduler._speculation._num_skipped = 1 << 20
    run.add("a", 20)
    run.step()
    assert run.scheduler.draft("a", 0, (Draft((1, 2), "text", 3),))
    steps = [run.step()[0] for _ in range(2)]
    assert [(row.sample, row.drafted) for step in steps for row in step.rows] == [(False, ()), (True, (1, 2))]
    run.finish()


def test_prompts_are_planned_ahead():
    run = Texts(max_steps_in_flight=2, max_num_batched_tokens=4)
    run.add("a", 20)
    assert run.plan()
    assert run.plan()
    run.finish()


def test_sequences_with_a_grammar_are_always_looked_for():
    run = Texts(COSTLY)
    run.add("a", 9, grammar="g")
    run.add("b", [7] * 3)
    for _ in range(30):
        run.step()
        assert ("a", 0) in run.scheduler.drafting()
    run.finish()


def test_who_is_about_to_end_or_has_no_token_yet_is_not_looked_for():
    run = Texts(max_num_batched_tokens=4)
    run.add("a", 6, max_tokens=3)
    assert run.scheduler.drafting() == []
    run.step()
    assert run.scheduler.drafting() == []
    run.step()
    assert run.scheduler.drafting() == [("a", 0)]
    run.step()
    assert run.scheduler.drafting() == []
    run.finish()


def test_nobody_looks_without_speculation():
    run = Ahead()
    run.add("a", 6)
    run.step()
    assert run.scheduler.drafting() == []
    run.finish()


# The draft model


def proposed(law: StepLaw, draft_law: StepLaw, num_rows: int, num_right: int) -> list[int]:
    """How many tokens a draft model is asked for, of which so many are right."""
    run = Texts(None, draft_model=True, max_num_seqs=32, max_num_batched_tokens=256)
    run.scheduler.calibrate(law, draft_law)
    for i in range(num_rows):
        run.add(f"r{i}", [i % 23] * 3)
    steps = [run.step()[0]]
    for _ in range(30):
        for name, index in run.scheduler.drafting():
            known = len(run.received.token_ids.get((name, index), ()))
            right = run.alone[name][known : known + min(num_right, steps[-1].num_proposed)]
            wrong = [(run.alone[name][-1] + 1) % 23] * (steps[-1].num_proposed - len(right))
            run.scheduler.draft(name, index, (Draft((*right, *wrong), "model"),))
        if run.scheduler.has_work:
            steps.append(run.step()[0])
    run.finish()
    return [step.num_proposed for step in steps if step.rows[0].count != 3]


def test_a_draft_model_is_asked_for_as_much_as_pays():
    right = proposed(FREE, make_law(1e-3, read_s=0.1), 1, 8)
    wrong = proposed(FREE, make_law(1e-3, read_s=0.1), 1, 0)
    assert max(right) > 4
    assert sum(wrong[15:]) < 5 < sum(right)
    assert not any(proposed(COSTLY, make_law(0.1, read_s=0.1), 16, 8))
    assert sum(proposed(FREE, make_law(1.0), 1, 8)) <= 1  # as slow as what it drafts for


# The records


def test_receipts_and_steps_tell_what_was_drafted_and_saved():
    run = Texts(FREE._replace(host_s=0.1, drafting_s=0.05))
    run.add("a", 9, num_right=3)
    run.add("b", [7] * 3, num_right=0)
    steps = []
    while run.scheduler.has_work:
        run.step()
        steps.append(run.scheduler.verified)
    metrics = [run.received.final[name, 0].metrics for name in "ab"]
    assert sum(one.num_drafted for one in steps) == sum(one.num_drafted for one in metrics) > 0
    assert sum(one.num_accepted for one in steps) == sum(one.num_accepted for one in metrics) > 0
    assert metrics[0].num_accepted > metrics[1].num_accepted
    assert metrics[0].drafting_saved_s > 0 > metrics[1].drafting_saved_s
    assert sum(one.num_drafts for one in steps) <= sum(one.num_drafted for one in steps)


def test_the_cost_of_looking_is_the_idle_time_it_adds():
    looking = LookingTime()
    for _ in range(20):
        looking.add(0.003, 0.001)
    assert looking.seconds == pytest.approx(0.001)
    for _ in range(20):
        looking.add(0.0005, 0.0)
    assert looking.seconds == pytest.approx(0.0025)


@pytest.mark.parametrize("cost_s", [0.0, 0.001])
def test_what_else_the_machine_does_is_no_cost_of_looking(cost_s):
    looking = LookingTime()
    for number in range(80):  # as an engine begins: few steps look for nothing
        idle_s = 0.0001 + (0.008 if number % 3 == 1 else 0.0)
        if 16 <= number < 20:
            looking.add(idle_s, 0.0)
        else:
            looking.add(idle_s + cost_s, cost_s or 1e-6)
    assert looking.seconds == pytest.approx(cost_s)


def test_the_law_of_a_draft_model_follows_its_times():
    passes = DraftPasses(make_law(0.1, read_s=0.1))
    step = Step(0, (Row(0, 50, 1), Row(1, 50, 3, drafted=(1, 2))), num_proposed=4)
    seconds = passes.law.seconds(passes.law.values([(50, 1)] * 2, 2))
    for _ in range(100):
        passes.add(step, 4 * 3 * seconds)
    assert passes.law.seconds(passes.law.values([(50, 1)] * 2, 2)) == pytest.approx(3 * seconds)
