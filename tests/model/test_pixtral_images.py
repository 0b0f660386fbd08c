"""Images of Mistral's models: sizes and patches, the tokens that end their rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked, tower_of
from tiny_vision import (
    CONFIG_LIGHTON,
    CONFIG_PIXTRAL,
    MARKS_PIXTRAL,
    PROCESSOR_LIGHTON,
    PROCESSOR_PIXTRAL,
    data_url,
    picture,
    write_lighton,
    write_pixtral,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.images.patches import BoundedPatches
from quire.images.positions import RotaryPositions
from quire.images.sizes import LongestSide
from quire.images.vision import Vision
from quire.program import ops
from quire.types import PromptImage

BREAK, IMG, END = MARKS_PIXTRAL
SMALL_CACHE = 64_000  # bytes of a cache for one request and a little more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixtral(tmp_path_factory.mktemp("pixtral"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, 30, 20)


def tower(processor: dict[str, Any] = PROCESSOR_PIXTRAL, whole: Any = None, **changes: Any) -> Vision:
    return tower_of({**CONFIG_PIXTRAL, **(whole or {})}, processor, **changes)


@pytest.mark.parametrize(
    ("height", "width", "resized"),
    [
        (16, 24, (16, 24)),
        (17, 23, (24, 24)),  # rounded up to whole squares
        (5, 6, (8, 8)),  # small images are not made larger
        (36, 36, (40, 40)),
        (72, 36, (40, 24)),
        (100, 57, (40, 24)),  # 36 x 20.5 pixels
        (900, 1, (40, 8)),
        (1, 90_000, (8, 40)),
    ],
)
def test_no_side_is_longer_than_the_longest(height: int, width: int, resized: tuple[int, int]) -> None:
    rule = tower().patching.size
    assert rule == LongestSide(8, 36, 25)
    assert rule.of(height, width) == resized


def test_patches_of_a_token_follow_one_another() -> None:
    """Each has its pixels, and its place: columns by the factor between the two lines of frequencies."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, BoundedPatches)
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (24, 3 * 16 + 2)
    assert patching.grid(16, 24) == (2, 3)
    assert patching.across == 10_000.0 ** (-1 / 4)  # heads of 8 numbers: two pairs by rows, two by columns
    number = 0
    for y, x in np.ndindex(2, 3):
        for down, right in np.ndindex(2, 2):
            row, column = 2 * y + down, 2 * x + right
            cut = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].transpose(2, 0, 1)
            np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
            assert patches[number, 48:].tolist() == [row, np.float32(column * patching.across)]
            number += 1


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    vision = tower()
    assert vision.patching.most == (100, 25)
    assert vision.bounded(25) == vision.bounded(999) == vision
    assert vision.bounded(24).patching.size == LongestSide(8, 36, 24)
    assert vision.bounded(24).patching.most == (96, 24)
    for most in range(1, 30):
        for height, width in ((40, 40), (40, 9), (9, 40), (1000, 30), (8, 8)):
            patching = vision.bounded(most).patching
            rows, columns = patching.grid(*patching.size.of(height, width))
            assert 1 <= rows * columns <= min(most, patching.most[1])
            assert (rows > columns) <= (height > width)
    assert vision.bounded(12).patching.size.of(40, 20) == (32, 16)  # 4.9 x 2.4 squares
    assert vision.bounded(10).patching.size.of(40, 12) == (40, 16)  # 10 squares: not made smaller


def test_places_of_tokens_between_rows() -> None:
    """They are no tokens of the image, but it ends only after its last row."""
    image = PromptImage(5, 3, 2, 24, 16, b"", gap=1)
    assert (image.num_tokens, image.end) == (6, 5 + 8)
    assert len(RotaryPositions.of([image]).known) == image.end


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 16}, "32 numbers in 16 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        ({"hidden_act": "unknown"}, "unknown"),
        ({"whole": {"vision_feature_layer": -2}}, "vision_feature_layer = -2 is not supported"),
        ({"whole": {"spatial_merge_size": 0}}, "spatial_merge_size = 0 is not a size"),
        ({"whole": {"projector_hidden_act": "unknown"}}, "unknown"),
        ({"processor": {"size": {"height": 30, "width": 36}}}, "size = .* is not supported"),
        ({"processor": {"size": {"longest_edge": "36"}}}, "size = .* is not supported"),
        ({"processor": {"size": 0}}, "size = 0 is not supported"),
        ({"processor": {"size": [36]}}, r"size = \[36\] is not supported"),
        ({"processor": {**PROCESSOR_PIXTRAL, "do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_the_norm_of_the_projector_has_the_epsilon_of_the_text_model() -> None:
    """In config.json or, without one there, in the text model's class."""
    text = {key: value for key, value in CONFIG_PIXTRAL["text_config"].items() if key != "rms_norm_eps"}
    for kind, eps in (("ministral3", 1e-5), ("mistral", 1e-6)):
        program = tower(whole={"text_config": {**text, "model_type": kind}}).program
        norms = [op for op in program if isinstance(op, ops.RMSNorm)]
        assert norms[-1].eps == eps


def test_images_of_lighton_ocr_are_rounded_as_the_file_says() -> None:
    def patching(**processor: Any) -> Any:
        return tower_of(CONFIG_LIGHTON, {"size": 36, **processor}).patching

    assert patching().size == patching(patch_size=8).size == LongestSide(8, 36, 25)
    loose = patching(patch_size={"height": 4, "width": 4})
    assert loose.size == LongestSide(4, 36, 25, merge=2)
    assert loose.size.of(36, 30) == (36, 32)
    assert loose.grid(36, 32) == (4, 4)
    assert loose.bounded(5).size.of(36, 30) == (16, 16)
    for height, width in ((36, 36), (900, 220), (200, 900), (36, 11), (9, 5), (12, 36)):
        rows, columns = (side // 4 for side in loose.size.of(height, width))
        assert rows * columns <= loose.most[0]
        assert loose.grid(4 * rows, 4 * columns) == (rows // 2, columns // 2)
    with pytest.raises(ValueError, match="4 x 30 pixels is too small or too narrow: it has less than 8"):
        loose.size.of(30, 4)
    with pytest.raises(ConfigError, match="patch_size = 16 is not supported"):
        patching(patch_size=16)


def test_patches_beside_the_squares_come_last() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 3), np.uint8)
    patches = tower_of(CONFIG_LIGHTON, PROCESSOR_LIGHTON).patching.patches(pixels)
    across = np.float32(10_000.0 ** (-1 / 4))
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    places += [(0, 2), (1, 2), (2, 2), (3, 2), (4, 0), (4, 1), (4, 2)]
    assert patches[:8, 48:].tolist() == [[y, np.float32(x * across)] for y, x in places[:8]]
    assert sorted(patches[8:, 48:].tolist()) == sorted([y, float(x * across)] for y, x in places[8:])


def test_rows_of_lighton_ocr_have_nothing_between(tmp_path: Path) -> None:
    folder = write_lighton(tmp_path)
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(1, 30, 20))}}]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        before = llm.get_tokenizer().encode(f"<|im_start|>user\n{'<|image_pad|>' * 8}<", parse_special=True)
        small = [{"type": "image_url", "image_url": {"url": data_url(picture(1, 30, 4))}}]
        with pytest.raises(RequestError, match="30 x 4 pixels is too small"):
            llm.chat([{"role": "user", "content": small}], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids[: len(before) - 1] == before[:-1]
    assert output.prompt_token_ids.count(before[-2]) == 8
    Asked(folder, "<|image_pad|>", 30, 20).check_steps()


@pytest.mark.parametrize("size", [{"longest_edge": 36}, {"height": 36, "width": 36}, 36])
def test_sizes_may_be_stated_in_several_ways(size: Any) -> None:
    assert tower({"size": size}).patching.size == LongestSide(8, 36, 25)
    assert tower({"patch_size": 14}).patching.size == LongestSide(8, 1024, 128**2)


def test_rows_of_an_image_end_with_tokens_of_their_own(folder: Path) -> None:
    """The template writes one mark; users who write marks get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1, 30, 20))}},
        {"type": "text", "text": f"{IMG}{BREAK}"},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        row = IMG * 4
        shown = f"<|im_start|>user\n{row}{BREAK}{row}{BREAK}{row}{END}"
        before = llm.get_tokenizer().encode(shown, parse_special=True)
    ids = output.prompt_token_ids
    assert ids[: len(before)] == before
    assert [ids.count(mark) for mark in sorted({*ids})[-3:]] == [2, 12, 1]


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_the_tokens_between_rows(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(END, "which ends rows of images", tmp_path)
