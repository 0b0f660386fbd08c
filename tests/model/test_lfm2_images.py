"""Images of LFM2-VL: their parts and the marks around these, patches, and what is refused."""

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
from safetensors.numpy import load_file, save_file
from tiny_vision import (
    CONFIG_LFM2,
    MARKS_LFM2,
    PROCESSOR_LFM2,
    data_url,
    picture,
    write_lfm2_vl,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.images.decode_job import run
from quire.images.patches import NaflexPatches
from quire.images.sizes import Cut, Tiles
from quire.images.vision import Vision

START, IMG, END, OVERVIEW, FIRST, SECOND = MARKS_LFM2
WIDTH, HEIGHT = 26, 13  # of pictures: two tiles of 2 x 2 tokens, and 2 x 3 of the overview
SMALL_CACHE = 32000  # bytes of a cache for one request and a little more
RULE = Tiles(16, 32, 64, 256, 512, 2, 10, 2.0, True)  # as published


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lfm2_vl(tmp_path_factory.mktemp("lfm2_vl"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, WIDTH, HEIGHT)


def tower(processor: dict[str, Any] | None = None, whole: Any = None, **changes: Any) -> Vision:
    return tower_of({**CONFIG_LFM2, **(whole or {})}, PROCESSOR_LFM2 | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 512), Cut((512, 512))),
        ((100, 100), Cut((256, 256))),  # at least 64 tokens
        ((700, 700), Cut((512, 512))),  # at most 256, and no more than twice as many without tiles
        ((724, 725), Cut((1024, 1024), 2, 2, (480, 512))),
        ((1080, 1920), Cut((1024, 2048), 2, 4, (384, 672))),
        ((3000, 400), Cut((4096, 512), 8, 1, (1376, 160))),
        ((10, 5000), Cut((32, 4992))),  # as long as it is
        ((1, 60_000), Cut((512, 5120), 1, 10, (32, 8192))),  # the overview has 256 tokens, too
        ((2, 1), Cut((384, 192))),
    ],
    ids=str,
)
def test_large_images_are_cut(size: tuple[int, int], expected: Cut) -> None:
    """All but the overview of the narrowest as transformers 5.24 does it."""
    assert RULE.cut(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 3000))
def test_every_image_is_in_its_bounds(height: int, width: int, most: int) -> None:
    rule = RULE.bounded(most)
    cut = rule.cut(height, width)
    shapes = [cut.size] if cut.overview is None else [cut.size, cut.overview]
    tokens = [rows // 32 * (columns // 32) for rows, columns in shapes]
    assert all(side > 0 and side % 32 == 0 for shape in shapes for side in shape)
    assert sum(tokens) <= rule.most_of_all <= most
    assert max(tokens[0] // (cut.rows * cut.columns), *tokens[1:], 1) <= rule.most_of_part
    assert (cut.rows * cut.columns > 1) == (cut.overview is not None)


def test_images_may_have_fewer_tokens_than_the_model_says() -> None:
    assert (RULE.most_of_part, RULE.most_of_all) == (256, 2816)
    assert RULE.bounded(2816) == RULE.bounded(9999) == RULE
    assert [RULE.bounded(most).tiles for most in (2815, 1280, 768, 767, 100)] == [9, 4, 2, 0, 0]
    assert RULE.bounded(767).cut(4000, 4000) == Cut((512, 512))
    assert RULE.bounded(50).cut(4000, 4000) == Cut((224, 224))
    assert tower({"use_thumbnail": False}).bounded(8).patching.most_of_all == 8
    vision = tower()
    assert vision.patching.most == (36, 9)
    assert vision.bounded(17).patching.most_of_all == 17
    assert vision.bounded(16).patching.most_of_all == 9


def test_parts_are_cut_from_the_resized_image() -> None:
    """The overview is resized from the image as it came."""
    image = Image.open(io.BytesIO(picture(1, 50, 30)))
    size = ["Tiles", [4, 8, 2, 9, 16, 2, 6, 1.0, True]]
    found = run({"data": data_url(picture(1, 50, 30))[22:], "max_pixels": 5000, "size": size, "resample": 2})
    assert (found["rows"], found["columns"]) == (2, 3)
    tiles = image.resize((48, 32), 2)
    boxes = [(x, y, x + 16, y + 16) for y in (0, 16) for x in (0, 16, 32)]
    expected = [tiles.crop(box) for box in boxes] + [image.resize((24, 16), 2)]
    assert [data_url(part.tobytes())[22:] for part in expected] == [part["pixels"] for part in found["parts"]]


@pytest.mark.parametrize(("rows", "columns"), [(3, 7), (2, 4), (1, 9)])
def test_places_are_resized_to_an_image(rows: int, columns: int) -> None:
    """As Pillow resizes numbers, by the same filter; shares of one place are together 1."""
    patching = tower().patching
    assert isinstance(patching, NaflexPatches)
    pixels = np.random.default_rng(0).integers(0, 256, (8 * rows, 8 * columns, 3), np.uint8)
    table = np.random.default_rng(1).random((5, 5), np.float32)
    patches = patching.patches(pixels)
    assert patches.shape == (4 * rows * columns, 48 + 25)
    np.testing.assert_allclose(patches[:, 48:].sum(axis=1), 1, rtol=1e-6)
    expected = np.asarray(Image.fromarray(table).resize((2 * columns, 2 * rows), Image.Resampling.BILINEAR))
    values, number = patching.normalization.apply(pixels), 0
    for y, x in np.ndindex(rows, columns):
        for down, right in np.ndindex(2, 2):
            row, column = 2 * y + down, 2 * x + right
            cut = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
            place = patches[number, 48:] @ table.reshape(-1)
            assert place == pytest.approx(expected[row, column], abs=1e-5)
            number += 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"num_patches": 24}, "24 positions of patches are not supported"),
        ({"hidden_act": "unknown"}, "unknown"),
        ({"whole": {"vision_feature_layer": -2}}, "vision_feature_layer = -2 is not supported"),
        ({"whole": {"downsample_factor": 3}}, "downsample_factor = 2, but the vision tower has 3"),
        ({"whole": {"projector_hidden_act": "unknown"}}, "unknown"),
        ({"processor": {"encoder_patch_size": 16}}, "encoder_patch_size = 16, but the vision tower has 4"),
        ({"processor": {"tile_size": 20}}, "2 to 4 tiles of 20 pixels, .* are not supported"),
        ({"processor": {"min_tiles": 1}}, "1 to 4 tiles"),
        ({"processor": {"min_tiles": 5}}, "5 to 4 tiles"),
        ({"processor": {"min_image_tokens": 10}}, "images of 10 to 9 tokens are not supported"),
        ({"processor": {"max_tiles": 101}}, "max_tiles = 101 is not a size"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


@pytest.mark.parametrize("processor", [{"do_image_splitting": False}, {"min_tiles": 1, "max_tiles": 1}])
def test_images_may_have_one_part_alone(processor: dict[str, Any]) -> None:
    patching = tower(processor).patching
    assert (patching.most, patching.most_of_all) == ((36, 9), 9)
    assert isinstance(patching, NaflexPatches)
    assert patching.size.cut(400, 400) == Cut((24, 24))


def test_marks_are_around_parts(folder: Path) -> None:
    """The template writes one mark; users who write marks get text."""
    large, small = picture(1, WIDTH, HEIGHT), picture(2, 16, 16)
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(large)}},
        {"type": "text", "text": f"{IMG}{START}"},
        {"type": "image_url", "image_url": {"url": data_url(small)}},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        shown = f"{START}{FIRST}{IMG * 4}{SECOND}{IMG * 4}{OVERVIEW}{IMG * 6}{END}"
        before = llm.get_tokenizer().encode(f"<|im_start|>user\n{shown}", parse_special=True)
        after = llm.get_tokenizer().encode(f"{START}{IMG * 4}{END}<|im_end|>", parse_special=True)
    ids = output.prompt_token_ids
    assert ids[: len(before)] == before
    assert [number for number in ids[len(before) :] if number >= min(after[:-1])] == after[:-1]


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()


def test_a_tokenizer_without_the_marks(asked: Asked, tmp_path: Path) -> None:
    asked.check_token(END, "which ends images", tmp_path)


def test_the_head_of_a_tower_is_not_needed(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    for name in ("model.vision_tower.head.probe", "model.vision_tower.tail.probe"):
        save_file(load_file(path) | {name: np.zeros(3, np.float32)}, path)
        if "tail" in name:
            with pytest.raises(ConfigError, match="tail"):
                LLM(str(tmp_path), **SETTINGS)
        else:
            LLM(str(tmp_path), **SETTINGS).close()
