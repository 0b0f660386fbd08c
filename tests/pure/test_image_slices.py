"""Images beside rows that give tokens are encoded in slices: their tokens never wait for a whole one."""

from __future__ import annotations

import pytest
from fake_runner import LAW
from test_scheduler import Run

from quire.types import ImageSlice, PromptImage, Step

Part = tuple[str, int, int] | None


def image(first: int, length: int, work: int, whole: bool = False) -> PromptImage:
    return PromptImage(first, 1, length, 1, 1, b"cat", whole, work)


def add(run: Run, name: str, length: int, *images: PromptImage, **fields):
    keys = tuple((one.first, one.pixels) for one in images)
    return run.add(name, length, images=images, block_keys=keys, **fields)


def decoding(**limits) -> Run:
    """One sequence decodes, beside which prompts have six tokens of a step."""
    run = Run(**{"max_num_prefill_tokens": 6} | limits)
    run.add("text", 3, max_tokens=40, ignore_eos=True)
    run.step()
    return run


def part_of(step: Step) -> Part:
    part: ImageSlice | None = step.image_slice
    return part and (part.request_id, part.begin, part.end)


def shown(step: Step) -> tuple[list[tuple[int, int]], Part]:
    """The rows (start, count) of a step but the first, and its slice."""
    return [(row.start, row.count) for row in step.rows[1:]], part_of(step)


def test_an_image_is_encoded_in_slices_beside_a_row_that_gives_tokens():
    """What is left of the budget after the last slice is for the prompt."""
    run = decoding()
    add(run, "a", 12, image(2, 8, work=20))
    found = [shown(run.step()[0]) for _ in range(6)]
    assert found == [
        ([(0, 2)], None),
        ([], ("a", 0, 6)),
        ([], ("a", 6, 12)),
        ([], ("a", 12, 18)),
        ([(2, 4)], ("a", 18, 20)),
        ([(6, 6)], None),
    ]
    run.finish()


def test_each_step_gives_the_other_streams_their_tokens():
    run = decoding()
    run.add("more", 3, max_tokens=40, ignore_eos=True)
    run.step()
    add(run, "a", 12, image(2, 8, work=50), max_tokens=1)
    for _ in range(9):
        step, outputs = run.step()
        assert {output.request_id for output in outputs} == {"text", "more"}
        assert [row.count for row in step.rows[:2]] == [1, 1]
    run.finish()


def test_an_image_alone_is_encoded_at_once():
    """Also beside prompts that give no token, and beside the tokens of a sequence that has ended."""
    run = Run(max_num_batched_tokens=8)
    add(run, "a", 12, image(2, 8, work=500))
    assert [part_of(run.step()[0]) for _ in range(2)] == [None, None]
    run.finish()


def test_the_rest_of_an_image_is_encoded_at_once_when_nothing_else_gives_tokens():
    run = decoding()
    add(run, "a", 12, image(2, 8, work=20))
    for _ in range(2):
        run.step()
    run.abort("text")
    step, _ = run.step()
    assert [(row.start, row.count) for row in step.rows] == [(2, 10)]
    assert step.image_slice is None
    run.finish()


def test_a_prompt_that_begins_with_an_image_is_admitted_when_it_is_encoded():
    run = decoding()
    add(run, "a", 12, image(0, 8, work=10))
    run.add("b", 2)
    found = [(len(step.admitted), *shown(step)) for step, _ in (run.step() for _ in range(3))]
    assert found == [(0, [], ("a", 0, 6)), (1, [(0, 2)], ("a", 6, 10)), (0, [(2, 6)], None)]
    run.finish()


@pytest.mark.parametrize(
    ("ids", "start", "parts"),
    [([*range(14), 99, 98], 12, [("a", 0, 6), ("a", 6, 9)]), (range(24), 20, [None, None])],
    ids=["a part", "all"],
)
def test_an_image_in_the_cache_is_not_encoded_unless_a_part_of_it_is_left(ids, start, parts):
    run = Run(max_num_prefill_tokens=6)
    add(run, "first", 20, image(4, 10, work=9))
    run.finish()
    run.add("text", 3, max_tokens=40, ignore_eos=True)
    run.step()
    run.add("a", ids, images=(image(4, 10, work=9),), block_keys=((4, b"cat"),))
    steps = [run.step()[0] for _ in range(2)]
    assert [part_of(step) for step in steps] == parts
    assert next(row.start for step in steps for row in step.rows[1:]) == start
    run.finish()


def test_several_images_are_encoded_one_after_the_other():
    run = decoding()
    add(run, "a", 20, image(1, 4, work=7), image(5, 4, work=5), image(11, 3, work=1))
    found = [shown(run.step()[0]) for _ in range(7)]
    assert found == [
        ([(0, 1)], None),
        ([], ("a", 0, 6)),
        ([(1, 4)], ("a", 6, 7)),
        ([(5, 1)], ("a", 0, 5)),
        ([(6, 5)], None),
        ([(11, 5)], ("a", 0, 1)),
        ([(16, 4)], None),
    ]
    run.finish()


def test_the_last_token_of_a_prompt_may_be_an_image():
    """Prompts have six tokens of a step beside the last token of each."""
    run = decoding()
    add(run, "a", 5, image(4, 1, work=9))
    assert [shown(run.step()[0]) for _ in range(3)] == [
        ([(0, 4)], None),
        ([], ("a", 0, 7)),
        ([(4, 1)], ("a", 7, 9)),
    ]
    run.finish()


def test_an_image_of_an_aborted_request_is_given_up():
    run = decoding()
    add(run, "a", 12, image(2, 8, work=20))
    for _ in range(3):
        run.step()
    run.abort("a")
    add(run, "b", 12, image(0, 8, work=20))
    assert [part_of(run.step()[0]) for _ in range(2)] == [("b", 0, 6), ("b", 6, 12)]
    run.finish()


def test_an_image_that_a_row_was_given_is_encoded_anew():
    """As for a preempted sequence: the device keeps an image until a row has it."""
    run, cat = decoding(), image(2, 8, work=5)
    for name in "ab":
        add(run, name, 12, cat, max_tokens=1)
        parts = [part_of(run.step()[0]) for _ in range(4)]
        assert [part for part in parts if part] == [(name, 0, 5)]
    run.finish()


def test_an_image_of_a_preempted_request_goes_on():
    """The one that decodes takes the blocks of the prompt, whose image stays where it is."""
    run = Run(num_blocks=7, max_num_prefill_tokens=3, num_spare_blocks=0)
    run.add("text", 10, max_tokens=14, ignore_eos=True)
    run.step()
    add(run, "a", 14, image(2, 8, work=40), max_tokens=2)
    parts = [part_of(run.step()[0]) for _ in range(11)]
    assert run.scheduler.num_preemptions == 1
    ends = [(one[1], one[2]) for one in parts if one]
    assert ends == [(3 * i, 3 * i + 3) for i in range(len(ends))]
    run.finish()


def test_a_goal_for_the_time_between_tokens_bounds_slices():
    """Three seconds are for 16 tokens beside a row, as of a prompt."""
    run = Run(max_num_batched_tokens=64, itl_goal_s=4.0)
    run.scheduler.calibrate(LAW)
    run.add("text", 3, max_tokens=40, ignore_eos=True)
    run.step()
    add(run, "a", 40, image(1, 30, work=100))
    run.add("b", 3)
    steps = [run.step()[0] for _ in range(5)]
    parts = [part_of(step) for step in steps]
    assert [one and one[2] - one[1] for one in parts] == [None, 16, 16, 16, 16]
    run.finish()


def test_an_image_whose_tokens_see_each_other_is_computed_whole_when_it_is_encoded():
    run = decoding(max_num_batched_tokens=16)
    add(run, "a", 14, image(2, 10, work=8, whole=True))
    assert [shown(run.step()[0]) for _ in range(4)] == [
        ([(0, 2)], None),
        ([], ("a", 0, 6)),
        ([(2, 10)], ("a", 6, 8)),
        ([(12, 2)], None),
    ]
    run.finish()


def test_steps_in_flight_have_their_slices_in_order():
    run = decoding(max_steps_in_flight=2)
    add(run, "a", 12, image(2, 8, work=15))
    scheduler, parts, pending = run.scheduler, [], []
    for _ in range(6):
        step = scheduler.schedule(run.now)
        parts.append(part_of(step))
        pending.append((step, run.runner.launch(step)))
        if len(pending) == 2:
            oldest, launched = pending.pop(0)
            run.received.take(scheduler.commit(oldest, launched.result(), run.now))
    assert parts == [None, ("a", 0, 6), ("a", 6, 12), ("a", 12, 15), None, None]
    step, launched = pending.pop()
    run.received.take(scheduler.commit(step, launched.result(), run.now))
    run.finish()
