"""Images of SmolVLM and Idefics3: their tiles and the marks around these, patches, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked, tower_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_vision import (
    CONFIG_SMOLVLM,
    MARKS_SMOLVLM,
    PROCESSOR_SMOLVLM,
    data_url,
    picture,
    write_smolvlm,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.images.decode_job import run
from quire.images.patches import TiledPatches
from quire.images.sizes import Cut, SquareTiles
from quire.images.vision import Vision

AROUND, IMG, OVERVIEW, *TILES = MARKS_SMOLVLM
WIDTH, HEIGHT = 30, 12  # of pictures: two tiles of 2 x 2 tokens, and an overview
SMALL_CACHE = 60_000  # bytes of a cache for one request and a little more
RULE = SquareTiles(2048, 512, 17)  # as published


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvlm(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, WIDTH, HEIGHT)


def tower(processor: dict[str, Any] | None = None, whole: Any = None, **changes: Any) -> Vision:
    return tower_of({**CONFIG_SMOLVLM, **(whole or {})}, PROCESSOR_SMOLVLM | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((100, 100), Cut((2048, 2048), 4, 4, (512, 512), (2048, 2048))),  # small images are made larger
        ((1080, 1920), Cut((1536, 2048), 3, 4, (512, 512), (1152, 2048))),
        ((1000, 333), Cut((2048, 1024), 4, 2, (512, 512), (2048, 682))),  # 681.98, up to an even number
        ((400, 401), Cut((2048, 2048), 4, 4, (512, 512), (2042, 2048))),
        ((1, 9999), Cut((512, 2048), 1, 4, (512, 512), (1, 2048))),
    ],
    ids=str,
)
def test_images_are_cut_into_squares(size: tuple[int, int], expected: Cut) -> None:
    assert RULE.cut(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 20))
def test_every_image_is_in_its_bounds(height: int, width: int, parts: int) -> None:
    """It has the largest grid of those that are allowed."""
    rule = SquareTiles(2048, 512, parts)
    cut = rule.cut(height, width)
    assert cut.size == (512 * cut.rows, 512 * cut.columns)
    assert cut.rows * cut.columns + (cut.overview is not None) <= parts
    assert (cut.overview is None) == (cut.rows * cut.columns == 1)
    if (longest := max(cut.rows, cut.columns)) < 4:
        larger = SquareTiles(512 * (longest + 1), 512, 17).cut(height, width)
        assert larger.rows * larger.columns >= parts


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    vision = tower()
    assert (vision.patching.most, vision.patching.most_of_all) == ((16, 4), 20)
    assert vision.bounded(20) == vision.bounded(99) == vision
    assert vision.bounded(12).patching.size.cut(40, 20) == Cut((36, 18), 2, 1, (18, 18), (36, 18))
    assert vision.bounded(11).patching.size.cut(40, 20) == Cut((18, 18), before=(36, 18))
    assert vision.bounded(19).patching.most_of_all == 16
    with pytest.raises(ConfigError, match="have 4 tokens, and max_image_tokens = 3"):
        vision.bounded(3)


def test_tiles_are_cut_from_an_image_resized_twice() -> None:
    """The overview is made of the same image as the tiles."""
    image = Image.open(io.BytesIO(picture(1, 50, 31)))
    size = ["SquareTiles", [36, 18, 5]]
    found = run({"data": data_url(picture(1, 50, 31))[22:], "max_pixels": 5000, "size": size, "resample": 1})
    assert (found["rows"], found["columns"]) == (2, 2)
    tiles = image.resize((36, 22), 1).resize((36, 36), 1)
    boxes = [(x, y, x + 18, y + 18) for y in (0, 18) for x in (0, 18)]
    expected = [tiles.crop(box) for box in boxes] + [tiles.resize((18, 18), 1)]
    assert [data_url(part.tobytes())[22:] for part in expected] == [part["pixels"] for part in found["parts"]]


def test_patches_of_a_token_follow_one_another() -> None:
    """Each has its pixels, and the row of its learned position; pixels at the ends are in none."""
    pixels = np.random.default_rng(0).integers(0, 256, (18, 18, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, TiledPatches)
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (16, 48 + 2)
    assert patching.grid(18, 18) == (2, 2)
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    for number, place in enumerate(order):
        y, x = 4 * (place // 4), 4 * (place % 4)
        cut = values[y : y + 4, x : x + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
        assert patches[number, 48:].tolist() == [place, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"hidden_act": "unknown"}, "unknown"),
        ({"image_size": 20}, "5 patches of a side, in squares of 2 x 2, are not supported"),
        ({"image_size": 3}, "0 patches of a side"),
        ({"image_size": 16}, "tiles of 18 pixels, but the vision tower takes 16"),
        ({"processor": {"max_image_size": {"longest_edge": 36}}}, "tiles of 36 pixels"),
        ({"processor": {"max_image_size": {"height": 18}}}, "max_image_size = .* is not supported"),
        ({"processor": {"size": {"height": 30, "width": 36}}}, "size = .* is not supported"),
        ({"processor": {"size": {"longest_edge": 4097}}}, "size = .* is not supported"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


@pytest.mark.parametrize(
    ("processor", "before"),
    [({"do_image_splitting": False}, (36, 18)), ({"size": {"longest_edge": 18}}, (18, 10))],
    ids=str,
)
def test_images_may_have_one_part_alone(processor: dict[str, Any], before: tuple[int, int]) -> None:
    patching = tower(processor).patching
    assert patching.most_of_all == 4
    assert patching.size.cut(40, 20) == Cut((18, 18), before=before)


def test_marks_are_around_tiles(folder: Path) -> None:
    """Rows of tiles end with lines, with an empty one before the overview; users who write marks get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1, 20, 20))}},
        {"type": "text", "text": f"{IMG}{AROUND}"},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        first, second, third, fourth = (f"{AROUND}{tile}{IMG * 4}" for tile in TILES)
        shown = f"{first}{second}\n{third}{fourth}\n\n{AROUND}{OVERVIEW}{IMG * 4}{AROUND}"
        before = llm.get_tokenizer().encode(f"<|im_start|>User:{shown}", parse_special=True)
    ids = output.prompt_token_ids
    assert ids[: len(before)] == before
    assert all(number < min(before[-6:]) for number in ids[len(before) :])


def test_videos_are_refused(folder: Path) -> None:
    parts = [{"type": "video", "video": "file:///film.mp4"}]
    with LLM(str(folder), **SETTINGS) as llm, pytest.raises(RequestError, match="video"):
        llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_the_marks(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(AROUND, "which ends images", tmp_path)
