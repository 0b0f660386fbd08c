"""Images of Llama 4: the canvas that is cut into tiles, marks between these, the class, what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import Asked, tower_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_vision import (
    CONFIG_LLAMA4,
    MARKS_LLAMA4,
    PROCESSOR_LLAMA4,
    data_url,
    picture,
    write_llama4,
)

from quire.errors import ConfigError
from quire.images.decode_job import run
from quire.images.normalization import Normalization
from quire.images.patches import ClassedPatches
from quire.images.sizes import CanvasTiles, Cut
from quire.images.vision import Vision
from quire.models.vision_llama4 import MARKS

BEGIN, PATCH, END, WHOLE, ACROSS, DOWN = MARKS_LLAMA4
WIDTH, HEIGHT = 30, 12  # of pictures: two tiles of 2 x 2 tokens, and an overview
SMALL_CACHE = 40_000  # bytes of a cache for one request and a little more
RULE = CanvasTiles(336, 16)  # as published


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama4(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, PATCH, WIDTH, HEIGHT)


def tower(processor: dict[str, Any] | None = None, **changes: Any) -> Vision:
    return tower_of(CONFIG_LLAMA4, PROCESSOR_LLAMA4 | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((336, 336), Cut((336, 336), canvas=(336, 336))),
        ((100, 50), Cut((336, 168), canvas=(336, 336))),  # a small image is made larger
        ((337, 336), Cut((337, 336), 2, 1, (336, 336), canvas=(672, 336))),
        ((100, 400), Cut((100, 400), 1, 2, (336, 336), canvas=(336, 672))),  # not beyond its longer side
        ((1080, 1920), Cut((1080, 1920), 4, 6, (336, 336), canvas=(1344, 2016))),
        ((3000, 3000), Cut((1344, 1344), 4, 4, (336, 336), canvas=(1344, 1344))),
        ((1600, 1200), Cut((1344, 1007), 4, 3, (336, 336), canvas=(1344, 1008))),  # 1007.99996 in float32
        ((1, 9999), Cut((1, 5376), 1, 16, (336, 336), canvas=(336, 5376))),
    ],
    ids=str,
)
def test_images_are_put_on_a_canvas(size: tuple[int, int], expected: Cut) -> None:
    rule = CanvasTiles(336, 24) if size == (1080, 1920) else RULE
    assert rule.cut(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 20))
def test_every_image_is_in_its_bounds(height: int, width: int, tiles: int) -> None:
    rule = CanvasTiles(336, tiles)
    cut = rule.cut(height, width)
    assert cut.canvas == (336 * cut.rows, 336 * cut.columns)
    assert all(1 <= side <= most for side, most in zip(cut.size, cut.canvas, strict=True))
    assert cut.rows * cut.columns <= tiles
    assert cut.rows * cut.columns + (cut.overview is not None) <= rule.parts
    assert (cut.overview is None) == (cut.rows * cut.columns == 1)


def test_the_canvas_is_black_and_the_overview_of_the_image() -> None:
    image = Image.open(io.BytesIO(picture(1, 40, 20)))
    size = ["CanvasTiles", [16, 6]]
    found = run({"data": data_url(picture(1, 40, 20))[22:], "max_pixels": 5000, "size": size, "resample": 2})
    assert (found["rows"], found["columns"]) == (2, 3)
    canvas = Image.new("RGB", (48, 32))
    canvas.paste(image, (0, 0))
    boxes = [(x, y, x + 16, y + 16) for y in (0, 16) for x in (0, 16, 32)]
    expected = [canvas.crop(box) for box in boxes] + [image.resize((16, 16), 2)]
    assert [data_url(part.tobytes())[22:] for part in expected] == [part["pixels"] for part in found["parts"]]


def test_marks_are_between_tiles() -> None:
    assert MARKS.around(1, 1, 1) == [BEGIN + WHOLE, END]
    assert MARKS.around(2, 2, 5) == [BEGIN, ACROSS, DOWN, ACROSS, DOWN + WHOLE, END]


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    vision = tower()
    assert (vision.patching.most, vision.patching.most_of_all) == ((17, 4), 20)
    assert vision.bounded(20) == vision.bounded(99) == vision
    assert vision.bounded(19).patching.size == CanvasTiles(16, 3)
    assert vision.bounded(12).patching.most_of_all == 12
    assert vision.bounded(11).patching.most_of_all == 4
    with pytest.raises(ConfigError, match="have 4 tokens, and max_image_tokens = 3"):
        vision.bounded(3)


def test_the_class_follows_the_patches() -> None:
    """Each patch has its pixels, its learned position, and its column and row; the class has no pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, ClassedPatches)
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (17, 48 + 6)
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    for number, place in enumerate(order):
        row, column = divmod(place, 4)
        cut = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
        assert patches[number, 48:].tolist() == [place, 1, 0, 0, column + 1, row + 1]
    assert patches[16].tolist() == [0] * 48 + [16, 1, 0, 1, 0, 0]


def test_pixels_are_rounded_to_halves() -> None:
    """As the model's own processor does it, if it does both."""
    shades = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    halves = tower().patching.normalization  # type: ignore[attr-defined]
    assert halves == Normalization(halves=True)
    found = halves.apply(shades)[..., 0].reshape(-1)
    assert found[[0, 1, 2, 100, 255]].tolist() == [-1, -0.9921875, -0.984375, -0.21484375, 1]
    assert tower({"do_normalize": False}).patching.normalization.halves is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"image_size": 20}, "20 pixels a side, 4 of a patch, pixel_shuffle_ratio = 0.5 are not supported"),
        ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio = 0.3 are not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        ({"processor": {"size": {"height": 8, "width": 8}}}, "size = .*, but the vision tower takes 16"),
        ({"processor": {"resize_to_max_canvas": True}}, "resize_to_max_canvas = True is not supported"),
        ({"processor": {"max_patches": 0}}, "max_patches = 0 is not a size"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_texts_have_the_same_answers_without_the_tower(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_marks_is_refused(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(END, "which ends images", tmp_path)
