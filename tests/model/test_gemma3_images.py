"""Images of Gemma 3: their patches, their places in prompts, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked
from tiny_vision import CONFIG3, MARKS3, PROCESSOR3, data_url, picture, write_gemma3

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.images.normalization import Normalization
from quire.images.vision import Vision
from quire.models import read_model

TOKENS = 16  # of an image
BEGIN, SOFT, END = MARKS3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, f"\n\n{BEGIN}{SOFT}{END}\n\n")


def tower(processor: dict[str, Any] = PROCESSOR3, **changes: Any) -> Vision:
    config = copy.deepcopy({**CONFIG3, "image_token_id": 9, "text_config": {**CONFIG3["text_config"]}})
    config["mm_tokens_per_image"] = changes.pop("mm_tokens_per_image", TOKENS)
    config["vision_config"] |= changes
    vision = read_model(config, processor).vision
    assert vision is not None
    return vision


def test_patches_of_a_token_follow_one_another() -> None:
    """Each has its pixels by channel, and the number of its place among all."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    patching = tower().patching
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (64, 3 * 16 + 2) == (patching.most[0], 50)
    number = 0
    for y, x in np.ndindex(4, 4):
        for down, right in np.ndindex(2, 2):
            row, column = 2 * y + down, 2 * x + right
            cut = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert np.array_equal(patches[number, :48], cut.transpose(2, 0, 1).reshape(-1))
            assert patches[number, 48:].tolist() == [8 * row + column, 1]
            number += 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Normalization(1 / 255, (0.5,) * 3, (0.5,) * 3)),
        ({"do_normalize": False, "image_mean": [0.1] * 3}, Normalization(1 / 255, (0.0,) * 3, (1.0,) * 3)),
        ({"do_rescale": False, "rescale_factor": 0.5}, Normalization(1.0, (0.5,) * 3, (0.5,) * 3)),
    ],
)
def test_a_processor_may_leave_pixels_as_they_are(changes: dict[str, Any], expected: Normalization) -> None:
    assert tower({**PROCESSOR3, **changes}).patching.normalization == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 30}, "16 tokens of 7 x 7 patches of 4 x 4 pixels are not supported"),
        ({"mm_tokens_per_image": 9}, "9 tokens of 8 x 8 patches"),
        ({"mm_tokens_per_image": 8}, "8 tokens of 8 x 8 patches"),
        ({"num_channels": 1}, "not supported"),
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"processor": {"size": {"height": 64, "width": 64}}}, "the vision tower takes 32 x 32 pixels"),
    ],
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_images_have_as_many_tokens_as_the_model_says() -> None:
    assert tower().bounded(TOKENS) == tower()
    with pytest.raises(ConfigError, match="have 16 tokens, and max_image_tokens = 15"):
        tower().bounded(15)


def test_a_chat_has_what_the_processor_of_the_model_writes_for_an_image(folder: Path) -> None:
    """The template writes one mark; users who write it get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
        {"type": "text", "text": BEGIN},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        shown = f"\n\n{BEGIN}{SOFT * TOKENS}{END}\n\n"
        before = {"prompt": f"<|im_start|>user\n{shown}", "trusted": True}
        (expected,) = llm.generate(before, SamplingParams(max_tokens=1))
    ids, begin = output.prompt_token_ids, expected.prompt_token_ids
    assert ids[: len(begin)] == begin
    marks = sorted({*ids})[-3:]  # the last tokens of the vocabulary
    assert [ids.count(mark) for mark in marks] == [1, TOKENS, 1]


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_an_image_that_no_step_has_room_for(asked: Asked) -> None:
    with pytest.raises(RequestError, match="an image has 16 tokens, but this model computes it in one step"):
        asked.ask(max_num_batched_tokens=15)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()
