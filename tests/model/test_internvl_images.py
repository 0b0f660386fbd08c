"""Images of InternVL: tiles in any grid, patches beside a class token, marks around all of them, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked, tower_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vision import (
    CONFIG_INTERNVL,
    MARKS_INTERNVL,
    PROCESSOR_INTERNVL,
    data_url,
    picture,
    write_internvl,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.images.patches import TiledPatches
from quire.images.sizes import Cut, GridTiles
from quire.images.vision import Vision

BEGIN, IMG, END = MARKS_INTERNVL
WIDTH, HEIGHT = 30, 12  # of pictures: two tiles of 2 x 2 tokens, and an overview
SMALL_CACHE = 60_000  # bytes of a cache for one request and a little more
RULE = GridTiles(448, 1, 13)  # as published


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, WIDTH, HEIGHT)


def tower(processor: dict[str, Any] | None = None, whole: Any = None, **changes: Any) -> Vision:
    return tower_of({**CONFIG_INTERNVL, **(whole or {})}, PROCESSOR_INTERNVL | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((100, 100), Cut((448, 448))),
        ((1080, 1920), Cut((896, 1792), 2, 4, (448, 448))),
        ((633, 1266), Cut((448, 896), 1, 2, (448, 448))),  # 2 x 4 tiles have more than twice the pixels
        ((634, 1268), Cut((896, 1792), 2, 4, (448, 448))),
        ((9999, 1), Cut((5376, 448), 12, 1, (448, 448))),
    ],
    ids=str,
)
def test_images_are_cut_by_the_nearest_grid(size: tuple[int, int], expected: Cut) -> None:
    assert RULE.cut(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 20), st.integers(1, 20))
def test_every_image_is_in_its_bounds(height: int, width: int, fewest: int, parts: int) -> None:
    cut = GridTiles(448, fewest, parts).cut(height, width)
    tiles = cut.rows * cut.columns
    assert cut.size == (448 * cut.rows, 448 * cut.columns)
    assert tiles + (cut.overview is not None) <= parts
    assert (cut.overview is None) == (tiles == 1)
    assert tiles >= min(fewest, parts - 1) or parts < 3 or tiles == max(1, parts - 1)


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    vision = tower()
    assert (vision.patching.most, vision.patching.most_of_all) == ((17, 4), 20)
    assert vision.bounded(20) == vision.bounded(99) == vision
    assert vision.bounded(12).patching.size.cut(20, 40) == Cut((16, 32), 1, 2, (16, 16))
    assert vision.bounded(11).patching.size.cut(20, 40) == Cut((16, 16))
    with pytest.raises(ConfigError, match="have 4 tokens, and max_image_tokens = 3"):
        vision.bounded(3)


def test_a_class_token_comes_after_the_patches() -> None:
    """Patches of a token follow one another; each has its pixels and a learned position after the first."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, TiledPatches)
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (17, 48 + 6)
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    for number, place in enumerate(order):
        y, x = 4 * (place // 4), 4 * (place % 4)
        cut = values[y : y + 4, x : x + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
        assert patches[number, 48:].tolist() == [place + 1, 1, 0, 1, 0, 0]
    assert patches[16].tolist() == [0] * 48 + [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"hidden_act": "unknown"}, "unknown"),
        ({"norm_type": "batch_norm"}, "norm_type = 'batch_norm' is not supported"),
        ({"use_absolute_position_embeddings": False}, "use_absolute_position_embeddings = False"),
        ({"image_size": 20}, "5 patches of a side, in squares of 2 x 2, are not supported"),
        ({"image_size": [16, 32]}, "image_size = .* is not a size"),
        ({"image_size": 8}, "size = .* but the vision tower has .*8"),
        ({"whole": {"vision_feature_layer": -2}}, "vision_feature_layer = -2 is not supported"),
        ({"whole": {"vision_feature_select_strategy": "full"}}, "select_strategy = 'full' is not supported"),
        ({"whole": {"downsample_ratio": 0}}, "downsample_ratio = 0 is not a number"),
        ({"whole": {"downsample_ratio": 0.3}}, "4 patches of a side, in squares of 3 x 3"),
        ({"processor": {"size": {"height": 32, "width": 32}}}, "but the vision tower has"),
        ({"processor": {"max_patches": 101}}, "max_patches = 101 is not a size"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_marks_are_around_all_tiles(folder: Path) -> None:
    """Users who write marks get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1, 40, 20))}},
        {"type": "text", "text": f"{IMG}{BEGIN}"},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        shown = f"<|im_start|>user\n{BEGIN}{IMG * 12}{END}\n"
        before = llm.get_tokenizer().encode(shown, parse_special=True)
    ids = output.prompt_token_ids
    assert ids[: len(before)] == before
    assert all(number < min(before[-4:-1]) for number in ids[len(before) :])


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_the_marks(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(END, "which ends images", tmp_path)
