"""Where the time of a request went: on a clock that advances by the law, receipts are exact."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from fake_runner import LAW, FakeRunner, Launched, Received

from quire.engine.caches import BlockGroup
from quire.engine.receipts import Receipt
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, RequestMetrics, Step

HOST_S = 0.25


def predict(law: StepLaw, rows: list[tuple[int, int]]) -> float:
    return law.seconds(law.values(rows, len(rows))) + law.host_s


class TimedRun:
    """A scheduler whose steps take as long as its law says; those in flight follow each other at once."""

    def __init__(self, num_blocks=200, law: StepLaw | None = LAW, mask_s=0.0, **limits) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 200} | limits
        self.scheduler = Scheduler(groups=[BlockGroup(num_blocks)], block_size=4, **limits)
        self.runner = FakeRunner(num_blocks, 4)
        self.received = Received()
        self.in_flight: deque[tuple[Step, Launched]] = deque()
        self.now = 0.0
        self.mask_s = mask_s
        self.law = law or LAW
        if law is not None:
            self.scheduler.calibrate(law)

    def add(self, name: str, prompt, max_tokens=4, **fields) -> None:
        own = {key: fields.pop(key) for key in NewRequest.__dataclass_fields__ if key in fields}
        prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
        self.scheduler.add(NewRequest(name, prompt, params, self.now, **own))

    def step(self) -> Step:
        while len(self.in_flight) < self.scheduler.max_steps_in_flight:
            step = self.scheduler.schedule(self.now)
            if step is None:
                break
            self.in_flight.append((step, self.runner.launch(step)))
        step, pending = self.in_flight.popleft()
        self.now += predict(self.law, [(row.start, row.count) for row in step.rows]) + self.mask_s
        result = replace(pending.result(), mask_s=self.mask_s)
        self.received.take(self.scheduler.commit(step, result, self.now))
        return step

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        while self.in_flight:
            self.step()

    def abort(self, name: str) -> None:
        self.received.take(self.scheduler.abort(name, self.now))

    def times(self, name: str, sequence=0) -> RequestMetrics:
        return self.received.final[name, sequence].metrics


def total_s(times: RequestMetrics) -> float:
    assert times.finished_s is not None
    return times.finished_s - times.arrival_s


def interference_s(times: RequestMetrics) -> float:
    return times.prefill_interference_s + times.decode_interference_s


# Interference


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_a_lone_request_is_delayed_by_nobody(ahead, n):
    run = TimedRun(max_steps_in_flight=ahead)
    run.add("a", 50, max_tokens=30, n=n, seed=1, temperature=1.0)
    run.finish()
    assert [interference_s(run.times("a", sequence)) for sequence in range(n)] == [0.0] * n


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("others", [[60], [60, 45], [3], [3, 60, 5]])
@pytest.mark.parametrize("host_s", [0.0, 0.25])
def test_interference_is_the_time_with_others_less_the_time_without(ahead, others, host_s):
    law = LAW._replace(host_s=host_s)
    without = TimedRun(max_steps_in_flight=ahead, law=law)
    without.add("a", 10, max_tokens=40)
    without.finish()
    run = TimedRun(max_steps_in_flight=ahead, law=law)
    run.add("a", 10, max_tokens=40)
    for _ in range(5):
        run.step()
    for number, length in enumerate(others):
        run.add(f"other {number}", [5 + number] * length, max_tokens=1)
    run.finish()
    times = run.times("a")
    assert interference_s(times) == pytest.approx(total_s(times) - total_s(without.times("a")))
    assert times.prefill_interference_s > 0


def test_prompts_and_decoding_of_others_are_told_apart():
    run = TimedRun()
    run.add("other", [7, 8], max_tokens=60)
    run.step()
    run.add("a", 1, max_tokens=10)
    run.finish()
    times = run.times("a")
    # Its first row is one token beside one of the other: 1 + 2 · 0.25 + 0.5 s, of which 0.25 s for the other.
    assert times.decode_interference_s == pytest.approx(10 * 0.25)
    assert times.prefill_interference_s == 0
    other = run.times("other")
    assert other.decode_interference_s == pytest.approx(10 * 0.25)


def test_a_step_without_a_row_is_interference_as_a_whole():
    """Its slot waits while the prompt of the one before takes the whole budget."""
    run = TimedRun(max_num_batched_tokens=16)
    run.add("long", [9] * 40, max_tokens=1)
    run.add("late", 4, max_tokens=2)
    run.step()
    assert run.scheduler.num_running == 1
    run.step()
    run.step()  # 8 tokens and 4
    run.finish()
    late = run.times("late")
    assert late.queue_s == pytest.approx(2 * 3.25)
    # The third step has 8 tokens of the other prompt: 1 + 2 · 0.25 + 12 · 0.125 s; alone 1 + 0.25 + 0.5 s
    assert late.prefill_interference_s == pytest.approx(3.0 - 1.75)


def test_one_that_enters_during_a_step_waits_for_its_end():
    run = TimedRun(max_steps_in_flight=2, max_num_batched_tokens=16)
    run.add("other", [9] * 3, max_tokens=50)
    run.step()
    run.add("a", 3, max_tokens=1)
    before = run.now
    run.step()  # planned before the request came; the next one has its row
    waited_s = run.now - before
    run.finish()
    times = run.times("a")
    assert times.queue_s == 0.0
    assert times.decode_interference_s == pytest.approx(waited_s + 0.25)


def test_choices_of_a_request_do_not_delay_each_other_and_share_what_delayed_their_prompt():
    run = TimedRun()
    run.add("other", [9] * 3, max_tokens=50)
    run.step()
    run.add("a", 2, max_tokens=5, n=2, seed=1, temperature=1.0)
    run.finish()
    first, second = run.times("a", 0), run.times("a", 1)
    assert first.decode_interference_s == pytest.approx(5 * 0.25)
    assert second.decode_interference_s == pytest.approx(6 * 0.25)


@pytest.mark.parametrize("num_prompt", [3, 5])
def test_the_ideal_of_a_choice_has_the_shared_prompt_once(num_prompt):
    """Whether one token or several are computed again for it, beside those in full blocks."""
    run = TimedRun()
    run.add("a", num_prompt, max_tokens=1, n=2, seed=1, temperature=1.0)
    run.finish()
    assert run.times("a", 0).ideal_s == run.times("a", 1).ideal_s == max(0.5, num_prompt * 0.125)


def test_without_a_law_only_what_is_measured_is_told():
    run = TimedRun(law=None, mask_s=0.5, num_blocks=8, num_spare_blocks=0)
    run.add("a", [1] * 9, max_tokens=12, grammar="g")
    run.add("b", [2] * 9, max_tokens=12)
    run.finish()
    a, b = run.times("a"), run.times("b")
    assert a.grammar_s > 0
    assert b.preempted_s > 0
    assert interference_s(a) == interference_s(b) == a.ideal_s == a.cached_saved_s == 0


# Masks, the cache, the roof


def test_masks_are_those_of_steps_with_a_grammar():
    run = TimedRun(mask_s=0.5)
    run.add("a", 4, max_tokens=6, grammar="g")
    run.add("b", [9] * 4, max_tokens=9)
    run.finish()
    assert run.times("a").grammar_s == 6 * 0.5
    assert run.times("b").grammar_s == 0


def test_the_cache_saves_what_computing_its_tokens_would_take():
    run = TimedRun()
    run.add("a", 50, max_tokens=1)
    run.finish()
    run.add("b", 50, max_tokens=1)
    run.finish()
    assert run.received.final["b", 0].num_cached_tokens == 48
    assert run.times("a").cached_saved_s == 0
    assert run.times("b").cached_saved_s == pytest.approx(3 * (1.25 + 16 * 0.125))
    host = TimedRun(law=LAW._replace(host_s=HOST_S))
    for name in ("a", "b"):
        host.add(name, 50, max_tokens=1)
        host.finish()
    assert host.times("b").cached_saved_s == pytest.approx(3 * (1.25 + 16 * 0.125 + HOST_S))


def test_the_ideal_is_its_own_rows_at_the_roof():
    run = TimedRun(max_num_batched_tokens=16)
    run.add("other", [9] * 30, max_tokens=40)
    run.add("a", 20, max_tokens=6)
    run.finish()
    # 2 tokens beside 14 of the other prompt, 15 beside its next token, 3, then 5 single ones
    assert run.times("a").ideal_s == pytest.approx(0.5 + 15 * 0.125 + 0.5 + 5 * 0.5)


def test_a_law_that_comes_late_covers_what_follows():
    run = TimedRun(law=None)
    run.add("a", 4, max_tokens=5)
    run.step()
    run.scheduler.calibrate(LAW)
    run.finish()
    assert run.times("a").ideal_s == pytest.approx(4 * 0.5)


# The timeline


def crowded(**limits) -> TimedRun:
    run = TimedRun(num_blocks=7, num_spare_blocks=0, enable_prefix_caching=False, **limits)
    run.add("old", [1] * 7, max_tokens=14)
    run.add("young", [2] * 7, max_tokens=14)
    return run


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_preemption_lasts_until_the_next_token(ahead):
    run = crowded(max_steps_in_flight=ahead)
    while run.scheduler.num_preemptions == 0:
        since_s = run.now
        run.step()
    num_known = len(run.received.token_ids["young", 0])
    while len(run.received.token_ids["young", 0]) == num_known:
        run.step()
    lasted_s = run.now - since_s
    run.finish()
    times = run.times("young")
    assert times.num_preemptions == 1
    assert times.preempted_s == pytest.approx(lasted_s)
    assert times.prefill_preempted_s == 0
    assert run.times("old").preempted_s == 0


def test_tokens_computed_again_are_not_ideal_and_no_interference():
    run, alone = crowded(), TimedRun()
    alone.add("young", [2] * 7, max_tokens=14)
    alone.finish()
    while run.scheduler.num_preemptions == 0:
        run.step()
    run.add("late", [3] * 4, max_tokens=3)  # its prompt comes with what is computed again
    run.finish()
    young = run.times("young")
    assert interference_s(young) > 0
    assert young.preempted_s > 0
    # What it computes again samples one token, which alone takes a step of its own.
    assert young.ideal_s == pytest.approx(alone.times("young").ideal_s, abs=0.5)
    own_s = total_s(alone.times("young")) - 1.75  # all tokens but the one that ends the preemption
    assert young.prefill_s + young.decode_s - interference_s(young) == pytest.approx(own_s)


def test_preemptions_one_after_the_other():
    """One before a token has come prolongs the first, one after a token begins anew."""
    receipt = Receipt(admitted_s=0.0, first_token_s=1.0, awaits_token=False)
    receipt.preempt(2.0)
    receipt.end_step_in_flight(3.0)
    receipt.preempt(5.0)  # it had been admitted, and computes again
    receipt.end_step_in_flight(6.0)
    receipt.take_token(9.0, running=True)
    assert (receipt.preempted_s, receipt.num_preemptions, receipt.awaits_token) == (6.0, 2, False)
    receipt.preempt(10.0)
    receipt.preempt(12.0)
    receipt.take_token(13.0, running=False)  # of a step in flight at the second
    receipt.end_step_in_flight(13.0)
    assert (receipt.preempted_s, receipt.awaits_token) == (9.0, True)
    receipt.take_token(17.0, running=True)
    assert (receipt.preempted_s, receipt.prefill_preempted_s) == (13.0, 0.0)


@pytest.mark.parametrize("moment", ["queued", "in its prompt", "while it generates", "preempted"])
def test_an_abort_ends_the_part_that_runs(moment):
    run = crowded(max_num_batched_tokens=16)
    if moment == "queued":
        run.add("late", 60)
        run.scheduler.abort("late", 0.0)
        run.now = 5.0
        run.add("late", 60)
        run.now = 9.0
        run.abort("late")
        times = run.times("late")
        assert (times.queue_s, times.prefill_s, times.decode_s, times.preempted_s) == (4.0, 0.0, 0.0, 0.0)
        return
    if moment == "in its prompt":
        run = TimedRun()
        run.add("young", 60)
        run.step()
        run.now += 1.0
        run.abort("young")
        times = run.times("young")
        assert (times.prefill_s, times.decode_s) == (pytest.approx(4.25), 0.0)
        return
    if moment == "while it generates":
        run.step()
        run.now += 2.0
        run.abort("young")
        assert run.times("young").decode_s == 2.0
        return
    while run.scheduler.num_preemptions == 0:
        run.step()
    before_s = run.now
    run.step()
    run.abort("young")
    times = run.times("young")
    assert times.preempted_s >= run.now - before_s > 0
    assert times.first_token_s is not None


def test_the_first_output_has_the_times_so_far():
    run = TimedRun()
    run.add("a", 20, max_tokens=3)
    outputs = []
    while run.scheduler.has_work:
        step = run.scheduler.schedule(run.now)
        run.now += 1.0
        outputs += run.scheduler.commit(step, run.runner.launch(step).result(), run.now)
    times = [output.metrics for output in outputs]
    assert (times[0].admitted_s, times[0].first_token_s, times[0].finished_s) == (0.0, 2.0, None)
    assert (times[0].queue_s, times[0].prefill_s, times[0].decode_s) == (0.0, 2.0, 0.0)
    assert times[1] is None
    assert times[2].finished_s == 4.0
