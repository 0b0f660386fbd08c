"""Prompts that give a vector, adapters, and what stands in the place of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_engine import ask
from test_scheduler import Run, check_findable, shape
from test_steps_in_flight import Ahead

from quire.engine.engine import validate
from quire.errors import RequestError
from quire.types import Failure, PromptImage, RowResult, StepResult


def test_a_pooled_prompt_is_one_row_and_gives_a_vector():
    run = Run()
    run.add("a", 12, pooling="mean")
    step, (output,) = run.step()
    assert shape(step) == [(0, 0, 12, False)]
    assert step.rows[0].num_logits == 1  # its last position gives the vector
    assert step.admitted[0].pooling == "mean"
    assert (output.finish_reason, output.token_ids, len(output.vector)) == ("stop", (), 2)
    check_findable(run, 0)
    run.finish()


def test_a_pooled_prompt_takes_nothing_from_the_cache():
    run = Run()
    run.add("a", 12, max_tokens=1)
    run.finish()
    run.add("b", 12, pooling="mean")
    assert shape(run.step()[0]) == [(0, 0, 12, False)]
    run.finish()


def test_a_pooled_prompt_waits_for_a_step_with_room_for_all_of_it():
    run = Run(max_num_batched_tokens=12)
    run.add("a", 6, max_tokens=3, ignore_eos=True)
    run.step()
    run.add("b", [5] * 12, pooling="mean")
    assert not run.step()[0].admitted
    assert not run.step()[0].admitted
    assert shape(run.step()[0]) == [(0, 0, 12, False)]
    run.finish()


def test_nothing_is_planned_for_a_pooled_prompt_in_flight():
    run = Ahead()
    run.add("a", 6, pooling="mean")
    run.plan()
    assert run.plan() is None
    assert run.collect()[0].vector
    run.finish()


def test_a_missing_vector_fails_the_request():
    run = Run()
    run.add("a", 6, pooling="mean")
    step = run.scheduler.schedule(0.0)
    (output,) = run.scheduler.commit(step, StepResult((RowResult(),)), 0.0)
    assert output.error == Failure("the device returned no vector")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1] * 33}, "33 tokens, but pooling computes a prompt in one step, and a step has 32"),
        ({"n": 2, "seed": 0, "temperature": 1.0}, "one vector"),
    ],
)
def test_what_cannot_be_pooled_is_refused(fields, message):
    run = Run()
    new = ask("a", fields.pop("prompt", [1] * 5), **fields)
    validate(new, run.scheduler)
    with pytest.raises(RequestError, match=message):
        validate(type(new)(new.request_id, new.prompt_token_ids, new.params, pooling="mean"), run.scheduler)


def test_a_pooled_prompt_may_be_as_long_as_the_model_reads():
    run = Run(max_model_len=16)
    run.add("a", 16, pooling="mean")
    validate(
        type(run.requests[0])("b", tuple(range(16)), run.requests[0].params, pooling="mean"), run.scheduler
    )
    run.finish()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "x"}, {"adapter": "y"}),
        ({"adapter": "x"}, {}),
        ({"adapter": "x", "cache_salt": "1:y"}, {"adapter": "x1", "cache_salt": "y"}),
        ({"block_keys": ((2, b"cat"),)}, {"block_keys": ((2, b"dog"),)}),
        ({"block_keys": ((2, b"cat"),)}, {"block_keys": ((1, b"cat"),)}),
        ({"block_keys": ((2, b"cat"),)}, {}),
        ({"block_keys": ((2, b"ca"), (3, b"t"))}, {"block_keys": ((2, b"cat"),)}),
    ],
)
def test_what_differs_beside_tokens_keeps_prefixes_apart(one, other):
    run = Run()
    run.add("a", 12, max_tokens=1, **one)
    run.finish()
    run.add("b", 12, max_tokens=1, **other)
    assert run.step()[0].rows[0].start == 0
    run.add("c", 12, max_tokens=1, **one)
    assert run.step()[0].rows[0].start == 8
    run.finish()


def test_a_key_counts_from_its_block_on():
    run = Run()
    run.add("a", 16, max_tokens=1, block_keys=((9, b"cat"),))
    run.finish()
    run.add("b", 16, max_tokens=1, block_keys=((9, b"dog"),))
    assert run.step()[0].rows[0].start == 8
    run.finish()


CAT = PromptImage(first=3, rows=1, columns=2, height=1, width=1, pixels=b"cat")


def test_the_device_is_told_of_adapters_and_images():
    run = Run()
    run.add("a", 12, adapter="x", images=(CAT,), block_keys=((3, b"cat"),))
    (admission,) = run.step()[0].admitted
    assert admission.adapter == "x"
    assert admission.images == (CAT,)
    run.finish()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_keys": ()}, "images without block_keys"),
        ({"images": (CAT, CAT)}, "not in order"),
        ({"images": (CAT._replace(first=-1),)}, "not in order"),
        ({"images": (CAT._replace(rows=0),)}, "not in order"),
        ({"images": (CAT._replace(width=2),)}, "other sizes than stated"),
        ({"images": (CAT._replace(columns=10),)}, "not inside the prompt"),
    ],
)
def test_images_that_cannot_be_right_are_refused(changes, message):
    run = Run()
    new = run.add("a", 12, images=(CAT,), block_keys=((3, b"cat"),))
    run.finish()
    validate(new, run.scheduler)
    with pytest.raises(RequestError, match=message):
        validate(replace(new, **changes), run.scheduler)


def test_a_model_that_keeps_nothing_pools():
    run = Run(groups=[])
    run.add("a", 12, pooling="mean")
    run.add("b", 5, pooling="mean")
    step, outputs = run.step()
    assert step.granted == ()
    assert [out.finish_reason for out in outputs] == ["stop", "stop"]
    run.finish()
