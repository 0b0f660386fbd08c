"""Images whose tokens see each other: a step computes all tokens of one, or none."""

from __future__ import annotations

import pytest
from fake_runner import LAW
from test_scheduler import Run, shape

from quire.engine.caches import BlockGroup
from quire.engine.engine import validate
from quire.errors import RequestError
from quire.types import PromptImage


def image(first: int, length: int, whole: bool = True) -> PromptImage:
    return PromptImage(first, 1, length, 1, 1, b"cat", whole)


def add(run: Run, name: str, length: int, *images: PromptImage, **fields):
    keys = tuple((one.first, one.pixels) for one in images)
    return run.add(name, length, images=images, block_keys=keys, **fields)


def chunks(run: Run, count: int) -> list[tuple[int, int]]:
    """(start, tokens) of the last row of the next steps."""
    return [(row.start, row.count) for row in (run.step()[0].rows[-1] for _ in range(count))]


def test_chunks_end_before_an_image_that_does_not_fit_in():
    run = Run(max_num_batched_tokens=10)
    add(run, "a", 30, image(4, 8), image(12, 3), image(16, 10))
    assert chunks(run, 4) == [(0, 4), (4, 8), (12, 4), (16, 10)]
    run.finish()


def test_other_images_are_divided():
    run = Run(max_num_batched_tokens=10)
    add(run, "a", 30, image(4, 8, whole=False))
    assert chunks(run, 3) == [(0, 10), (10, 10), (20, 10)]
    run.finish()


def test_a_prompt_may_begin_and_end_with_an_image():
    run = Run(max_num_batched_tokens=8)
    add(run, "a", 16, image(0, 8), image(8, 8))
    assert chunks(run, 3) == [(0, 8), (8, 8), (16, 1)]
    run.finish()


def test_an_image_may_exceed_what_prompts_have_of_a_step():
    run = Run(max_num_batched_tokens=16, max_num_prefill_tokens=4)
    run.add("a", 3, max_tokens=12)
    run.step()
    add(run, "b", 12, image(2, 10))
    add(run, "c", 18, image(0, 10))
    assert chunks(run, 4) == [(0, 2), (2, 10), (0, 10), (10, 4)]
    run.finish()


def test_an_image_joins_no_step_with_another_chunk_beyond_the_limit():
    run = Run(max_num_batched_tokens=16, max_num_prefill_tokens=6)
    run.add("a", 3, max_tokens=12)
    run.step()
    run.add("b", 4)
    add(run, "c", 20, image(0, 10))
    assert shape(run.step()[0]) == [(0, 3, 1, True), (1, 0, 4, True)]
    assert run.step()[0].rows[-1].count == 10
    run.finish()


@pytest.mark.parametrize("law", [None, LAW])
def test_an_image_waits_for_a_step_with_room(law):
    """Those before it end at some time; nothing that comes later passes it."""
    run = Run(max_num_batched_tokens=10, itl_goal_s=3.0)
    if law is not None:
        run.scheduler.calibrate(law)
    run.add("a", 3, max_tokens=4, ignore_eos=True)
    run.step()
    add(run, "b", 12, image(0, 10))
    run.add("c", 4)
    assert [len(run.step()[0].rows) for _ in range(3)] == [1, 1, 1]
    assert shape(run.step()[0]) == [(0, 0, 10, False)]
    run.finish()


def test_a_running_prompt_waits_for_room_too():
    run = Run(max_num_batched_tokens=10)
    run.add("a", 3, max_tokens=4, ignore_eos=True)
    run.step()
    add(run, "b", 14, image(4, 10))
    run.add("c", 4)
    assert shape(run.step()[0])[1:] == [(1, 0, 4, False)]
    assert [len(run.step()[0].rows) for _ in range(2)] == [1, 1]
    assert shape(run.step()[0]) == [(1, 4, 10, True)]
    run.finish()


def test_a_goal_for_the_time_between_tokens_divides_no_image():
    run = Run(max_num_batched_tokens=64, itl_goal_s=4.0)
    run.scheduler.calibrate(LAW)
    run.add("a", 3, max_tokens=20, ignore_eos=True)
    run.step()
    add(run, "b", 40, image(2, 30))
    assert chunks(run, 3) == [(0, 2), (2, 30), (32, 8)]
    run.finish()


@pytest.mark.parametrize("groups", [None, [BlockGroup(64), BlockGroup(64, 5)]], ids=["whole", "window"])
def test_a_cached_prefix_ends_outside_of_images(groups):
    """Images of 6 tokens are at 4 and 10. The later prompts end in the second one, or after it."""
    run = Run(groups=groups)
    add(run, "a", 30, image(4, 6), image(10, 6))
    run.finish()
    assert _start(run, 15) == 4  # 12 cached tokens end in the second image, 8 in the first
    assert _start(run, 20) == 16
    run.finish()


def _start(run: Run, length: int) -> int:
    """Where a prompt that is a beginning of the first one goes on."""
    images = [one for one in (image(4, 6), image(10, 6)) if one.first < length]
    images[-1] = images[-1]._replace(columns=min(6, length - images[-1].first))
    new = add(run, f"of {length}", length, *images)
    step, _ = run.step()
    assert step.admitted[0].request_id == new.request_id
    return step.rows[-1].start


def test_blocks_are_loaded_up_to_a_place_outside_of_images():
    run = Run()
    new = add(run, "a", 30, image(4, 6))
    run.finish()
    run.scheduler.caches.forget()
    offered = [{0}] * 6
    assert [len(run.scheduler.load(new, 0, offered[:count])) for count in (2, 3)] == [1, 2]


def test_a_preempted_prompt_recomputes_its_images_whole():
    run = Run(num_blocks=8, max_num_batched_tokens=12, num_spare_blocks=0)
    run.add("a", 10, max_tokens=14, ignore_eos=True)
    run.step()
    add(run, "b", 16, image(3, 6), max_tokens=4, ignore_eos=True)
    run.finish()
    assert run.scheduler.num_preemptions


def test_an_image_larger_than_a_step_is_refused():
    run = Run(max_num_batched_tokens=10)
    new = add(run, "a", 30, image(4, 10))
    run.finish()
    validate(new, run.scheduler)
    large = add(Run(), "b", 30, image(4, 11))
    with pytest.raises(RequestError, match="an image has 11 tokens, but this model computes it in one step"):
        validate(large, run.scheduler)
