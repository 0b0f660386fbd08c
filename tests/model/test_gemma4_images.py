"""Images of Gemma 4: their sizes and patches, their places in prompts, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked, answer
from tiny_vision import CONFIG4, CONFIG4E, MARKS4, PROCESSOR4, data_url, picture, write_gemma4

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.images.sizes import TokenBudget
from quire.images.vision import Vision
from quire.models import read_model
from quire.program import Program, ops

TOKENS = 16  # of a square picture
BEGIN, SOFT, END = MARKS4
KINDS = {"large": CONFIG4, "small": CONFIG4E}
SMALL = {"large": 120_000, "small": 64_000}  # bytes of a cache for one request and a little more


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_gemma4(tmp_path_factory.mktemp(kind), config) for kind, config in KINDS.items()}


@pytest.fixture(scope="module")
def asked(folders: dict[str, Path]) -> dict[str, Asked]:
    return {kind: Asked(folder, f"{BEGIN}{SOFT}{END}") for kind, folder in folders.items()}


def read(processor: dict[str, Any] = PROCESSOR4, text: Any = None, **changes: Any) -> tuple[Program, Vision]:
    config = copy.deepcopy({**CONFIG4, "image_token_id": 9})
    config["text_config"] |= text or {}
    config["vision_config"] |= changes
    model = read_model(config, processor)
    assert model.vision is not None
    return model.program, model.vision


def tower(processor: dict[str, Any] = PROCESSOR4, **changes: Any) -> Vision:
    return read(processor, **changes)[1]


@pytest.mark.parametrize(
    ("height", "width", "resized"),
    [
        (40, 40, (4, 4)),
        (480, 480, (4, 4)),
        (100, 200, (2, 5)),  # 2.8 x 5.7 squares fill the budget
        (300, 50, (9, 1)),
        (1, 9, (1, 12)),
        (5, 90, (1, 16)),  # rounded down to no row at all: as long as its shape says, and the budget allows
        (900, 1, (16, 1)),
        (7, 119, (1, 16)),
        (100, 1700, (1, 16)),
    ],
)
def test_images_keep_their_shape_and_fill_the_budget(height: int, width: int, resized: Any) -> None:
    rule = tower().patching.size
    assert rule == TokenBudget(12, 16)
    assert rule.of(height, width) == (12 * resized[0], 12 * resized[1])
    assert resized[0] * resized[1] <= 16


def test_patches_of_a_token_follow_one_another() -> None:
    """Each has its pixels, channels together; rows of the table and their factors; and its place."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 36, 3), np.uint8)
    patching = tower().patching
    patches, values = patching.patches(pixels), pixels.astype(np.float32) / 255 * 2 - 1
    assert patches.shape == (54, 3 * 16 + 6)
    assert patching.grid(24, 36) == (2, 3)
    assert patching.most == (144, 16)
    number = 0
    for y, x in np.ndindex(2, 3):
        for down, right in np.ndindex(3, 3):
            row, column = 3 * y + down, 3 * x + right
            cut = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            np.testing.assert_allclose(patches[number, :48], cut.reshape(-1), atol=1e-6)
            assert patches[number, 48:].tolist() == [column, 64 + row, 1, 1, column, row]
            number += 1


def test_a_processor_may_say_how_pixels_are_normalized() -> None:
    plain = tower().patching.normalization
    assert (plain.mean, plain.std) == ((0.5,) * 3, (0.5,) * 3)
    stated = {**PROCESSOR4, "do_normalize": True, "image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    other = tower(stated).patching.normalization
    np.testing.assert_allclose([other.mean, other.std], [[0.2] * 3, [0.1] * 3])
    assert tower({**stated, "do_normalize": False}).patching.normalization == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 6}, "heads of 6 numbers are not supported"),
        ({"position_embedding_size": 47}, "images of 48 patches in a line, and 47 positions"),
        ({"num_key_value_heads": 2}, "3 query heads cannot share 2 key heads evenly"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        ({"use_clipped_linears": "yes"}, "use_clipped_linears = 'yes' is not a boolean"),
        ({"processor": {**PROCESSOR4, "patch_size": 16}}, "patch_size = 16, but the vision tower has 4"),
        ({"processor": {**PROCESSOR4, "max_soft_tokens": 0}}, "max_soft_tokens = 0 is not a size"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    vision = tower()
    assert vision.bounded(16) == vision.bounded(999) == vision
    assert vision.bounded(7).patching.most == (63, 7)
    assert vision.bounded(7).patching.size == TokenBudget(12, 7)


def test_only_window_layers_let_tokens_of_images_see_each_other() -> None:
    program, vision = read()
    assert vision.whole
    assert [op.causal for op in program if isinstance(op, ops.Attention)] == [False, True] * 2
    program, vision = read(text={**CONFIG4E["text_config"]})
    assert not vision.whole
    assert [op.causal for op in program if isinstance(op, ops.SharedAttention)] == [False, True]


def test_tokens_of_images_have_the_inputs_of_layers_that_padding_has() -> None:
    program, _ = read(text={**CONFIG4E["text_config"], "pad_token_id": 3})
    assert [op.replaced for op in program if isinstance(op, ops.Embed)] == [None, (9, 3)]
    with pytest.raises(ConfigError, match="pad_token_id = -1 is not a number"):
        read(text={**CONFIG4E["text_config"], "pad_token_id": -1})


def test_a_chat_has_what_the_processor_of_the_model_writes_for_an_image(folders: dict[str, Path]) -> None:
    """The template writes one mark; users who write it get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
        {"type": "text", "text": SOFT},
    ]
    with LLM(str(folders["large"]), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        before = {"prompt": f"<|im_start|>user\n{BEGIN}{SOFT * TOKENS}{END}", "trusted": True}
        (expected,) = llm.generate(before, SamplingParams(max_tokens=1))
    ids, begin = output.prompt_token_ids, expected.prompt_token_ids
    assert ids[: len(begin)] == begin
    marks = sorted({*ids})[-3:]  # the last tokens of the vocabulary
    assert [ids.count(mark) for mark in marks] == [1, TOKENS, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_steps_changes_no_bit(kind: str, asked: dict[str, Asked]) -> None:
    asked[kind].check_steps()


@pytest.mark.parametrize("kind", KINDS)
def test_caches_neighbours_and_preemption_change_no_bit(kind: str, asked: dict[str, Asked]) -> None:
    asked[kind].check_company(SMALL[kind])


def test_an_image_that_no_step_has_room_for(asked: dict[str, Asked]) -> None:
    with pytest.raises(RequestError, match="an image has 16 tokens, but this model computes it in one step"):
        asked["large"].ask(max_num_batched_tokens=15)
    small = asked["small"]
    assert answer(small.ask(max_num_batched_tokens=15)) == answer(small.ask())


@pytest.mark.parametrize("kind", KINDS)
def test_without_images_the_tower_is_left_out(kind: str, asked: dict[str, Asked]) -> None:
    asked[kind].check_texts()
