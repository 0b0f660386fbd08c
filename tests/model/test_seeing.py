"""Prompts with images on the reference backend: any chunks, batches and caches give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver
from seeing import TEXT, TOKEN, image, prompt_of, scores, scores_in_slices, seeing, weights_of
from tiny_vision import CONFIG, PROCESSOR

from quire.backends.reference import ReferenceBackend
from quire.backends.slot_images import Encoding, UnseenImages
from quire.errors import ConfigError
from quire.images.positions import RotaryPositions
from quire.images.work import EncodingWork
from quire.models import read_model
from quire.program.ops import RotaryAt
from quire.sampling_params import SamplingParams
from quire.types import Admission, ImageSlice, PromptImage, Row, Step

PROGRAM, VISION = seeing()
WEIGHTS = weights_of(PROGRAM, VISION)
ONE, TWO = image(VISION, 5, seed=1), image(VISION, 22, seed=2, rows=2, columns=5)


def driver() -> Driver:
    groups = len(PROGRAM.cache_groups)
    backend = ReferenceBackend(
        PROGRAM, WEIGHTS, num_blocks=[64] * groups, block_size=16, num_slots=3, vision=VISION
    )
    return Driver(PROGRAM, backend)


@pytest.mark.parametrize("chunk", [7, 1])
def test_any_chunks_and_neighbours_give_the_same_bits(chunk: int) -> None:
    expected = scores(driver(), ONE, TWO)
    assert scores(driver(), ONE, TWO, chunk=chunk) == expected
    assert scores(driver(), ONE, TWO, chunk=chunk, beside=True) == expected


@pytest.mark.parametrize("ends", [(1, 13, 26, 39), (40,), (7, 40), (1, 2, 3)])
def test_any_slices_give_the_same_bits(ends: tuple[int, ...]) -> None:
    """Whatever is left when a row needs an image is encoded then."""
    expected = scores(driver(), ONE, TWO)
    assert scores_in_slices(driver(), ONE, TWO, ends=ends) == expected


def test_a_slice_of_another_image_begins_anew() -> None:
    """One that was begun for a request that was aborted, or that others were encoded after."""
    expected, run, other = scores(driver(), ONE, TWO), driver(), image(VISION, 5, seed=3)
    text = run.admit(2, TEXT[7:20])
    run.step((text, 13), image_slice=ImageSlice("gone", other, 0, 30))
    run.step((text, 1), image_slice=ImageSlice("r0", ONE, 0, 10))
    run.step((text, 1), image_slice=ImageSlice("gone", other, 0, 10))
    run.step((text, 1), image_slice=ImageSlice("r0", ONE, 10, 20))
    assert scores(run, ONE, TWO) == expected


def test_an_image_changes_what_follows_it_and_nothing_before() -> None:
    expected = scores(driver(), ONE, TWO)
    for other, at in ((image(VISION, 5, seed=3), 5), (image(VISION, 5, seed=1, rows=4, columns=3), 5)):
        found = scores(driver(), other, TWO)
        assert all(found[position] == expected[position] for position in range(1, at + 1))
        assert all(found[position] != expected[position] for position in range(at + 1, 48))
    found = scores(driver(), ONE, image(VISION, 22, seed=3, rows=2, columns=5))
    assert [position for position in expected if found[position] != expected[position]] == [*range(23, 48)]


def test_a_text_has_the_bits_that_it_has_without_a_tower() -> None:
    plain = ReferenceBackend(PROGRAM, WEIGHTS, num_blocks=[64], block_size=16, num_slots=3)
    run, found = Driver(PROGRAM, plain), []
    for one in (run, driver()):
        sequence = one.admit(0, TEXT)
        one.step((sequence, len(TEXT)))
        found.append(sequence.scores())
    assert found[0] == found[1]


@pytest.mark.parametrize("start", [16, 32])
def test_a_row_may_begin_within_an_image_or_after_it(start: int) -> None:
    """What is cached of an image needs no image: only what is left of it is computed."""
    run, ids = driver(), prompt_of(ONE, TWO)
    whole = run.admit(0, ids, images=(ONE, TWO))
    run.step((whole, len(ids)))
    rest = run.admit(1, ids, start=start, shared=whole, images=(ONE, TWO))
    run.step((rest, len(ids) - start))
    expected = whole.scores()
    assert rest.scores() == {at: expected[at] for at in range(start + 1, len(ids) + 1)}


def test_images_are_encoded_once_when_a_row_reaches_them() -> None:
    unseen = UnseenImages()
    admission = Admission(4, "r", 0, SamplingParams(), (), 40, images=(ONE, TWO))
    unseen.apply(Step(0, (), admitted=(admission,)))

    def taken(start: int, count: int) -> list[tuple[int, PromptImage]]:
        return unseen.take([Row(4, start, count, (), False, 0)])

    assert taken(0, 5) == []
    assert taken(5, 1) == [(4, ONE)]
    assert taken(6, 16) == []
    assert taken(22, 99) == [(4, TWO)]
    unseen.apply(Step(1, (), admitted=(admission,)))
    assert taken(ONE.end, 99) == [(4, TWO)]  # the first is in the cache
    unseen.apply(Step(2, (), released=(4,)))
    assert taken(0, 99) == []


def test_what_has_begun_goes_on_until_another_image_is_encoded() -> None:
    unseen, number = UnseenImages(), iter(range(99))
    admission = Admission(4, "r", 0, SamplingParams(), (), 40, images=(ONE, TWO))

    def encoded(end: int | None, *rows: tuple[int, int], of: PromptImage = ONE) -> list[Encoding]:
        part = None if end is None else ImageSlice("r", of, 0, end)
        planned = tuple(Row(4, start, count, (), False, 0) for start, count in rows)
        return unseen.encodings(Step(next(number), planned, image_slice=part))

    unseen.apply(Step(0, (), admitted=(admission,)))
    assert encoded(10) == [(-1, ONE, 0.25, False)]
    assert encoded(20) == [(-1, ONE, 0.5, True)]
    assert encoded(40, (0, 9)) == [(4, ONE, 1.0, True)]
    assert encoded(10, of=TWO) == [(-1, TWO, 0.25, False)]
    assert encoded(10) == [(-1, ONE, 0.25, False)]
    assert encoded(10, (20, 9)) == [(4, TWO, 1.0, False), (-1, ONE, 0.25, False)]


def test_work_is_counted_in_tokens_of_a_prompt() -> None:
    """Worked by hand but for what is computed row by row: products and attention."""
    sizes = {name: spec.size for name, spec in PROGRAM.weights().items() if spec.quantizable}
    token = 2 * sum(sizes.values()) - 2 * 64 * 32 + 4 * 3 * 2 * 24 * 128.5
    shapes = {name: spec.shape for name, spec in VISION.program.weights().items() if len(spec.shape) == 2}
    per_patch = sum(a * b for name, (a, b) in shapes.items() if "blocks" in name or "patch_embed" in name)
    per_token = sum(a * b for name, (a, b) in shapes.items() if "merger" in name)
    work = EncodingWork(VISION, PROGRAM)
    for num_tokens in (64, 256):
        patches = 4 * num_tokens
        operations = 2 * patches * per_patch + 2 * num_tokens * per_token + 4 * 2 * 32 * patches**2
        assert work.of(num_tokens) == pytest.approx(operations / token, rel=0.05)
    assert work.of(1) == 2


def test_positions_of_images_are_those_of_a_grid() -> None:
    """Worked by hand: 3 x 4 tokens from position 5 on take 4 positions, 2 x 5 take 5."""
    found = RotaryPositions.of((ONE, TWO))
    grid = [[5, 5, 5], [5, 5, 6], [5, 5, 7], [5, 5, 8], [5, 6, 5]]
    assert found.slice(3, 10).tolist() == [[3] * 3, [4] * 3, *grid]
    assert found.slice(16, 18).tolist() == [[5, 7, 8], [9, 9, 9]]
    assert found.slice(22, 23).tolist() == [[14, 14, 14]]
    assert found.slice(31, 34).tolist() == [[14, 15, 18], [19, 19, 19], [20, 20, 20]]
    assert found.slice(40, 41).tolist() == [[27, 27, 27]]
    assert RotaryPositions.of(()).slice(3, 5).tolist() == [[3] * 3, [4] * 3]


def test_positions_of_a_square_are_mixed_from_the_learned_ones() -> None:
    """A picture of 6 x 6 patches has the learned grid itself; a larger one is between its places."""
    pixels = np.zeros((24, 24, 3), np.uint8)
    places = VISION.patching.patches(pixels)[:, 96:]
    y, x = places[:, 8], places[:, 9]
    assert np.array_equal(places[:, 0], 6 * y + x)
    assert np.array_equal(places[:, 4:8], [[1, 0, 0, 0]] * 36)
    assert [*y[:6], *x[:6]] == [0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 2, 3]  # squares of 2 x 2 follow one another
    large = VISION.patching.patches(np.zeros((88, 24, 3), np.uint8))[:, 96:]
    odd = large[(large[:, 8] == 1) & (large[:, 9] == 2)][0]  # half way between rows 0 and 1 of the grid
    corners = odd[:4][odd[4:8] > 0]
    assert np.allclose(odd[4:8].sum(), 1)
    assert set(corners) == {2.0, 8.0}


def test_a_processor_may_name_another_filter_of_resizing() -> None:
    config = {**CONFIG, "image_token_id": TOKEN}
    filters = [read_model(config, {**PROCESSOR, **own}).vision for own in ({}, {"resample": 2})]
    assert [own and own.patching.resample for own in filters] == [3, 2]


def test_the_base_of_rotations_by_place_is_a_setting() -> None:
    def bases(**stated: Any) -> set[float]:
        config = {**CONFIG, "image_token_id": TOKEN, "vision_config": {**CONFIG["vision_config"], **stated}}
        vision = read_model(config, PROCESSOR).vision
        return {op.theta for op in vision.program if isinstance(op, RotaryAt)} if vision else set()

    assert bases() == bases(rope_parameters={"rope_type": "axial"}) == {10_000.0}
    assert bases(rope_parameters={"rope_type": "axial", "rope_theta": 500.0}) == {500.0}
    with pytest.raises(ConfigError, match=r"rope_parameters = .* are not supported"):
        bases(rope_parameters={"rope_type": "yarn", "factor": 2.0})
