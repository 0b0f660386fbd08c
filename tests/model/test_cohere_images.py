"""Images of Aya Vision and Command A Vision: tiles, marks around them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asked import SETTINGS, Asked, tower_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vision import (
    CONFIG_AYA,
    CONFIG_COHERE2,
    MARKS_COHERE,
    PROCESSOR_COHERE,
    data_url,
    picture,
    write_cohere,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.images.sizes import Cut, GridTiles
from quire.images.vision import Vision
from quire.models import read_model

BEGIN, IMG, END, LINE, OVERVIEW, *TILES = MARKS_COHERE
WIDTH, HEIGHT = 36, 18  # of pictures: two tiles of 2 x 2 tokens, and an overview
SMALL_CACHE = 80_000  # bytes of a cache for one request and a little more
FITTED = GridTiles(512, 1, 13, fitted=True)  # as published


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cohere(tmp_path_factory.mktemp("aya"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, WIDTH, HEIGHT)


def tower(
    config: dict[str, Any], processor: dict[str, Any] | None = None, whole: Any = None, **changes: Any
) -> Vision:
    return tower_of({**config, **(whole or {})}, PROCESSOR_COHERE | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((100, 500), Cut((512, 512))),
        ((513, 500), Cut((1024, 512), 2, 1, (512, 512))),
        ((1080, 1920), Cut((1536, 2048), 3, 4, (512, 512))),
        ((512, 1024), Cut((512, 1024), 1, 2, (512, 512))),
        ((9999, 100), Cut((6144, 512), 12, 1, (512, 512))),  # all grids are smaller
        ((4000, 4000), Cut((1536, 1536), 3, 3, (512, 512))),
    ],
    ids=str,
)
def test_grids_are_as_large_as_an_image_needs(size: tuple[int, int], expected: Cut) -> None:
    assert FITTED.cut(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 20))
def test_every_image_is_in_its_bounds(height: int, width: int, parts: int) -> None:
    """Where a grid exists to which it is not made smaller, it is not."""
    cut = GridTiles(512, 1, parts, fitted=True).cut(height, width)
    tiles = cut.rows * cut.columns
    assert tiles + (cut.overview is not None) <= parts
    assert (cut.overview is None) == (tiles == 1)
    if -(-height // 512) * -(-width // 512) <= max(1, parts - 1):
        assert cut.size[0] >= height
        assert cut.size[1] >= width


@pytest.mark.parametrize("config", [CONFIG_AYA, CONFIG_COHERE2], ids=["aya", "cohere 2"])
def test_images_may_have_fewer_tokens_than_the_model_says(config: dict[str, Any]) -> None:
    vision = tower(config)
    assert (vision.patching.most, vision.patching.most_of_all) == ((16, 4), 20)
    assert vision.bounded(20) == vision.bounded(99) == vision
    assert vision.bounded(12).patching.size.cut(30, 60) == Cut((18, 36), 1, 2, (18, 18))
    assert vision.bounded(11).patching.size.cut(30, 60) == Cut((18, 18))
    with pytest.raises(ConfigError, match="have 4 tokens, and max_image_tokens = 3"):
        vision.bounded(3)


def test_images_of_cohere_2_are_cut_if_the_file_says_so() -> None:
    for config, most in ((CONFIG_AYA, 20), (CONFIG_COHERE2, 4)):
        assert tower(config, {"crop_to_patches": False}).patching.most_of_all == most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"image_size": 20}, "5 patches of a side, in squares of 2 x 2, are not supported"),
        ({"image_size": 16}, "size = .* but the vision tower has .*16"),
        ({"whole": {"vision_feature_layer": -2}}, "vision_feature_layer = -2 is not supported"),
        ({"whole": {"vision_feature_select_strategy": "default"}}, "strategy = 'default' is not supported"),
        ({"whole": {"alignment_intermediate_size": 41}}, "= 41 is not of two equal halves"),
        ({"whole": {"downsample_factor": 3}}, "4 patches of a side, in squares of 3 x 3"),
        ({"processor": {"max_patches": 101}}, "max_patches = 101 is not a size"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(CONFIG_AYA, **changes)


def test_the_text_model_scales_its_logits() -> None:
    """As it does alone, and as other engines do; transformers' classes of the whole do not."""
    text = {**CONFIG_AYA["text_config"], "vocab_size": 99, "logit_scale": 0.25}
    alone = read_model({"architectures": ["Cohere2ForCausalLM"], **text}).program
    assert read_model({**CONFIG_AYA, "text_config": text}).program.ops == alone.ops


def prompt_of(folder: Path, width: int, text: str) -> tuple[list[int], list[int]]:
    """Return the prompt of a picture, and the tokens of this text, with which it should begin."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1, width, 18))}},
        {"type": "text", "text": f"{IMG}{BEGIN}<image>"},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        expected = llm.get_tokenizer().encode(f"<|im_start|>user\n{text}", parse_special=True)
    return list(output.prompt_token_ids), list(expected)


@pytest.mark.parametrize(("width", "count"), [(18, 1), (36, 2)])
def test_marks_of_aya_are_before_tiles(width: int, count: int, folder: Path) -> None:
    """Users who write marks get text."""
    tiles = "".join(f"{tile}{IMG * 4}" for tile in TILES) if count > 1 else ""
    ids, expected = prompt_of(folder, width, f"{BEGIN}{tiles}{OVERVIEW}{IMG * 4}{END}")
    assert ids[: len(expected)] == expected
    assert all(number < min(expected[-6:]) for number in ids[len(expected) :])


@pytest.mark.parametrize(("width", "count"), [(18, 1), (36, 3)])
def test_marks_of_cohere_2_are_after_tiles(width: int, count: int, tmp_path: Path) -> None:
    folder = write_cohere(tmp_path, CONFIG_COHERE2)
    ids, expected = prompt_of(folder, width, f"{BEGIN}{f'{IMG * 4}{LINE}' * count}{END}")
    assert ids[: len(expected)] == expected


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_the_marks(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(END, "which ends images", tmp_path)
