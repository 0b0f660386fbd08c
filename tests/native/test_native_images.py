"""Towers and prompts with images on the native backend, against their reference twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver import Driver
from lowered import ISAS, OneOp, nodes_of, on_native, on_reference, plain, planned, scheme, tensors
from seeing import TEXT, Scores, image, prompt_of, scores, scores_in_slices, seeing, weights_of, whole
from test_seeing_in_slices import SCHEDULES, check_schedule
from tiny import Paged, same_bits

from quire.backends.backend import Capacity
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.backends.reference import ReferenceBackend
from quire.backends.slot_images import batch_of
from quire.program import Builder, Names, Program, Value, WeightSpec, ops
from quire.types import ImageSlice, Step
from quire.weights.load import load
from quire.weights.plan import plan

W = Names("w")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_mixed_rows(format: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 33, 70):
        places = np.concatenate([rng.integers(0, 9, (19, 4)), rng.random((19, 4))], axis=1).astype(np.float32)

        def record(b: Builder, x: Value, width: int = width) -> Value:
            table = WeightSpec("w.weight", (9, width), ("w.weight",))
            return b.record(ops.MixedRows(b.value((width,)), x, table)).out

        op = OneOp([places], record)
        assert same_bits(op.native(isa, format), op.reference(format))


@pytest.mark.parametrize("isa", ISAS)
def test_rotary_by_places(isa: str) -> None:
    places = np.random.default_rng(0).integers(0, 50, (19, 2)).astype(np.float32)
    for dim in (4, 20, 72):

        def record(b: Builder, x: Value, places: Value) -> Value:
            return b.record(ops.RotaryAt(b.value(x.shape), x, places, 10000.0)).out

        op = OneOp([draw(19, 2, dim), places], record)
        assert same_bits(op.native(isa), op.reference())


def by_tokens(op: OneOp, paged: Paged, patches: int, tokens: int) -> np.ndarray:
    """What a program gives for the tokens of an image of so many patches."""
    batch = replace(batch_of(np.zeros((patches, 1)), tokens), token_ids=np.arange(patches))
    return np.array(paged.backend.execute(batch))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_are_joined_and_averaged(isa: str) -> None:
    """Four rows of patches become one row of a token."""

    def joined(b: Builder, x: Value) -> Value:
        return b.record(ops.JoinRows(b.value((4 * x.width,), "L"), b.add(x, x))).out

    def averaged(b: Builder, x: Value) -> Value:
        return b.record(ops.MeanOfRows(b.value(x.shape, "L"), b.add(x, x), 4)).out

    x = draw(72, 15)
    sums = 2 * x.reshape(18, 4, 15)
    for record, expected in ((joined, sums.reshape(18, 60)), (averaged, sums.mean(axis=1))):
        op = OneOp([x], record)
        checkpoint = op.checkpoint()
        found = by_tokens(op, on_native(op.program, checkpoint, "f32", isa), 72, 18)
        assert same_bits(found, by_tokens(op, on_reference(op.program, checkpoint, "f32"), 72, 18))
        assert np.allclose(found, expected, atol=1e-6)


PROGRAM, VISION = (plain(part) for part in seeing())
WEIGHTS = weights_of(PROGRAM, VISION)
ONE, TWO = image(VISION, 5, seed=1), image(VISION, 22, seed=2, rows=2, columns=5)


def on(
    isa: str,
    format: str = "f32",
    threads: int | Sequence[int] = 1,
    ahead: bool = False,
    cache: str = "float32",
) -> Driver:
    return Driver(PROGRAM, new_backend(isa, format, threads, ahead, cache))


def see_natively(program: Program, capacity: Capacity) -> NativeBackend:
    """The backend of a scheduler, with a thread of its own."""
    return new_backend(ISAS[0], "f32", 2, True, "float32", capacity.num_blocks, capacity.max_num_seqs)


def new_backend(
    isa: str,
    format: str,
    threads: int | Sequence[int],
    ahead: bool,
    cache: str,
    num_blocks: Sequence[int] = (64,),
    num_slots: int = 3,
) -> NativeBackend:
    both = whole(PROGRAM, VISION)
    packed = load_packed(
        planned(both, tensors(WEIGHTS, format), scheme(format)), isa=isa, nodes=nodes_of(threads)
    )
    return NativeBackend(
        PROGRAM,
        packed.matrices,
        packed.vectors,
        num_blocks=num_blocks,
        block_size=16,
        kv_cache_dtype=cache,
        isa=isa,
        nodes=nodes_of(threads),
        max_num_seqs=num_slots,
        vision=VISION,
        ahead=ahead,
    )


def apart(found: Scores, expected: Scores) -> float:
    """The largest difference of two predictions of the same tokens."""
    values = [
        [{entry.token_id: entry.logprob for entry in one[position]} for one in (found, expected)]
        for position in expected
    ]
    return max(abs(own[token] - other[token]) for own, other in values for token in other)


@pytest.mark.parametrize("isa", ISAS)
def test_images_as_on_the_reference_backend(isa: str) -> None:
    weights = load(plan(whole(PROGRAM, VISION).weights(), tensors(WEIGHTS, "f32"), None, ()))
    reference = ReferenceBackend(PROGRAM, weights, num_blocks=[64], block_size=16, num_slots=3, vision=VISION)
    expected = scores(Driver(PROGRAM, reference), ONE, TWO)
    assert apart(scores(on(isa), ONE, TWO), expected) < 1e-4
    assert apart(scores(on(isa), TWO), expected) > 0.1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "bf16", "int8"])
def test_any_chunks_neighbours_and_threads_give_the_same_bits(format: str, isa: str) -> None:
    expected = scores(on(isa, format), ONE, TWO)
    for chunk, threads, beside in ((7, 1, False), (1, 2, True), (99, 2, True)):
        found = scores(on(isa, format, threads), ONE, TWO, chunk=chunk, beside=beside)
        assert found == expected, (chunk, threads, beside)
    assert scores(on(isa, format, 2, ahead=True), ONE, TWO, chunk=30) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_any_slices_give_the_same_bits(format: str, isa: str) -> None:
    """They end within products and attention too; whatever is left is encoded when a row needs it."""
    expected = scores(on(isa, format), ONE, TWO)
    for ends, threads in (
        ((*range(1, 41),), 2),
        ((7, 39), 1),
        ((40,), 2),
        ((1, 30), 2),
        ((*range(1, 41),), (2, 1)),
    ):
        assert scores_in_slices(on(isa, format, threads), ONE, TWO, ends=ends) == expected, (ends, threads)
    assert scores_in_slices(on(isa, format, 2, ahead=True), ONE, TWO, ends=(5, 23, 35)) == expected


def test_a_slice_of_another_image_begins_anew() -> None:
    expected, run, other = scores(on(ISAS[0]), ONE, TWO), on(ISAS[0]), image(VISION, 5, seed=3)
    text = run.admit(2, TEXT[7:20])
    run.step((text, 13), image_slice=ImageSlice("gone", other, 0, 30))
    for one, begin in ((ONE, 0), (other, 0), (ONE, 10)):
        run.step((text, 1), image_slice=ImageSlice("r0", one, begin, begin + 10))
    assert scores(run, ONE, TWO) == expected


def test_slices_divide_the_time_of_encoding() -> None:
    """Of eight none takes nearly nothing, and none half of what all take; the best of three times."""
    run, large = on(ISAS[-1]), image(VISION, 5, seed=1, rows=24, columns=24)
    text = run.admit(2, TEXT[7:20])
    run.step((text, 13))
    launch, rounds = run.backend.launch, list[list[float]]()

    def kept(step: Step) -> Any:
        result = launch(step).result()
        rounds[-1].append(result.image_s)
        return SimpleNamespace(result=lambda: result)

    run.backend.launch = kept  # type: ignore[method-assign]
    for seed in range(3):
        rounds.append([])
        for end in range(5, 41, 5):
            run.step((text, 1), image_slice=ImageSlice("r", large._replace(first=seed), end - 5, end))
    best = [min(times) for times in zip(*rounds, strict=True)]
    assert 0.02 * sum(best) < min(best) <= max(best) < 0.5 * sum(best), best


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slices_behind_the_scheduler(schedule: str) -> None:
    check_schedule(schedule, see_natively)


@pytest.mark.parametrize("isa", ISAS)
def test_the_attention_of_towers_keeps_halves_if_the_cache_does(isa: str) -> None:
    """It is rounded then, in any chunks alike; what follows an image is nearly the same."""
    expected = scores(on(isa, cache="bfloat16"), ONE, TWO)
    assert scores(on(isa, threads=2, cache="bfloat16"), ONE, TWO, chunk=7, beside=True) == expected
    assert 0 < apart(expected, scores(on(isa), ONE, TWO)) < 0.2
    assert apart(expected, scores(on(isa, cache="bfloat16"), TWO)) > 1


def test_a_slot_is_used_again_without_what_it_saw() -> None:
    run = on(ISAS[0])
    first = run.admit(0, prompt_of(ONE), images=(ONE,))
    run.step((first, 12))  # within the image
    run.release(first)
    assert scores(run) == scores(on(ISAS[0]))


def test_encoding_is_timed_apart() -> None:
    run = on(ISAS[0])
    sequence = run.admit(0, prompt_of(ONE), images=(ONE,))
    results, launch = [], run.backend.launch

    def kept(step: Step) -> Any:
        launched = launch(step)
        results.append(launched.result())
        return SimpleNamespace(result=lambda: results[-1])

    run.backend.launch = kept  # type: ignore[method-assign]
    for count in (5, 1, 10):
        run.step((sequence, count))
    assert [result.image_s > 0 for result in results] == [False, True, False]
    assert all(0 < result.device_s < result.ended_s - result.began_s + 1e-9 for result in results)
