"""Images of Llava: the middle of an image, towers that give less than they have, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import SETTINGS, Asked, answer, tower_of
from PIL import Image
from safetensors.numpy import load_file, save_file
from tiny_vision import (
    CONFIG_LLAVA,
    CONFIG_PIXTRAL,
    MARKS_LLAVA,
    MARKS_PIXTRAL,
    PROCESSOR_LLAVA,
    PROCESSOR_PIXTRAL,
    data_url,
    picture,
    write_llava,
    write_pixtral,
)

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.images.decode_job import run
from quire.images.patches import TiledPatches
from quire.images.sizes import Cut, OneSquare
from quire.images.vision import Vision
from quire.models import read_model

_, IMG = MARKS_LLAVA
SMALL_CACHE = 60_000  # bytes of a cache for one request and a little more
ALL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
CLIP = CONFIG_LLAVA["vision_config"]
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {
    **CONFIG_LLAVA,
    **ALL,
    "text_config": {**CONFIG_LLAVA["text_config"], "model_type": "mistral"},
    "vision_config": {**CONFIG_PIXTRAL["vision_config"], "model_type": "pixtral"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return Asked(folder, IMG, 30, 20)


def tower(processor: dict[str, Any] | None = None, whole: Any = None, **changes: Any) -> Vision:
    return tower_of({**CONFIG_LLAVA, **(whole or {})}, PROCESSOR_LLAVA | (processor or {}), **changes)


@pytest.mark.parametrize(
    ("size", "resized"),
    [((336, 336), (336, 336)), ((50, 99), (336, 665)), ((99, 50), (665, 336)), ((9, 1), (3024, 336))],
    ids=str,
)
def test_the_shorter_side_has_the_size(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert OneSquare(336, middle=True).cut(*size) == Cut(resized, middle=(336, 336))


def test_narrow_images_are_refused() -> None:
    with pytest.raises(ValueError, match="201 x 1 pixels is too narrow"):
        OneSquare(336, middle=True).cut(1, 201)
    assert OneSquare(336).cut(1, 201) == Cut((336, 336))


def test_the_middle_is_cut_from_a_resized_image() -> None:
    """Of an odd number of pixels too many, one more is left out at the end."""
    image = Image.open(io.BytesIO(picture(1, 50, 31)))
    file, size = data_url(picture(1, 50, 31))[22:], ["OneSquare", [16, True]]
    found = run({"data": file, "max_pixels": 5000, "size": size, "resample": 3})
    expected = image.resize((25, 16), 3).crop((4, 0, 20, 16))
    assert [part["pixels"] for part in found["parts"]] == [data_url(expected.tobytes())[22:]]
    assert (found["rows"], found["columns"]) == (1, 1)


def test_the_class_token_has_no_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, TiledPatches)
    assert (patching.most, patching.most_of_all) == ((17, 16), 16)
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    for place in range(16):
        y, x = 4 * (place // 4), 4 * (place % 4)
        cut = values[y : y + 4, x : x + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patches[place, :48], cut.reshape(-1))
        assert patches[place, 48:].tolist() == [place + 1, 1, 0, 1, 0, 0]
    assert patches[16].tolist() == [0] * 48 + [0, 1, 0, 0, 0, 1]


def test_images_have_their_tokens_or_are_refused() -> None:
    assert tower().bounded(16) == tower()
    with pytest.raises(ConfigError, match="have 16 tokens, and max_image_tokens = 15"):
        tower().bounded(15)


@pytest.mark.parametrize(("layer", "count"), [(-2, 2), ([-1], 3), (1, 1), (-4, 0), (0, 0), (3, 3)])
def test_layers_after_the_chosen_one_are_not_computed(layer: Any, count: int) -> None:
    program = tower(whole={"vision_feature_layer": layer}).program
    layers = {name.split(".")[4] for name in program.weights() if ".layers." in name}
    assert layers == {str(number) for number in range(count)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24 numbers in 5 heads are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"hidden_act": "unknown"}, "unknown"),
        ({"image_size": 24}, "size = .* and crop_size = .* are not supported"),
        ({"model_type": "dinov2"}, "a tower 'dinov2' with vision_feature_select_strategy = 'default' is not"),
        ({"model_type": ["clip_vision_model"]}, "is not supported"),
        ({"model_type": "siglip_vision_model"}, "'siglip_vision_model' .* 'default' is not supported"),
        ({"whole": {"vision_feature_select_strategy": "full"}}, "'clip_vision_model' .* 'full' is not"),
        ({"whole": {"vision_feature_layer": -5}}, "vision_feature_layer = -5 of 3 layers is not supported"),
        ({"whole": {"vision_feature_layer": [-2, -1]}}, r"vision_feature_layer = \[-2, -1\]"),
        ({"whole": {"projector_hidden_act": "unknown"}}, "unknown"),
        ({"whole": {**PIXTRAL, "vision_feature_layer": -2}}, "vision_feature_layer = -2 is not supported"),
        ({"processor": {"size": {"height": 32, "width": 32}}}, "size = .* are not supported"),
        ({"processor": {"crop_size": {"height": 8, "width": 8}}}, "crop_size = .* are not supported"),
        ({"processor": {"do_center_crop": False}}, "size = .* are not supported"),
        ({"processor": {"do_pad": True}}, "do_pad = True is not supported"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


@pytest.mark.parametrize(
    ("processor", "middle"),
    [
        ({"size": 16, "crop_size": 16}, True),
        ({"size": {"height": 16, "width": 16}}, False),
        ({"size": {"height": 16, "width": 16}, "do_center_crop": False, "crop_size": 8}, False),
    ],
    ids=str,
)
def test_sizes_may_be_stated_in_several_ways(processor: dict[str, Any], middle: bool) -> None:
    assert tower(processor).patching.size == OneSquare(16, middle)


def test_numbers_of_pixels_are_those_of_the_processor_of_a_tower() -> None:
    assert tower().patching.normalization.mean == (0.48145466, 0.4578275, 0.40821073)
    plain = tower_of({**CONFIG_LLAVA, **ALL, "vision_config": SIGLIP}, {"do_resize": True})
    assert plain.patching.normalization.mean == (0.5, 0.5, 0.5)


def test_the_text_model_may_tie_its_embeddings() -> None:
    tied = {**CONFIG_LLAVA, "text_config": {**CONFIG_LLAVA["text_config"], "tie_word_embeddings": True}}
    assert read_model({**tied, "tie_word_embeddings": False}).config.tie_word_embeddings
    assert not read_model(CONFIG_LLAVA).config.tie_word_embeddings


def test_an_image_has_tokens_alone(folder: Path) -> None:
    """Users who write the mark get text."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1, 30, 20))}},
        {"type": "text", "text": IMG},
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        shown = f"<|im_start|>user\n{IMG * 16}\n"
        before = llm.get_tokenizer().encode(shown, parse_special=True)
    ids = output.prompt_token_ids
    assert ids[: len(before)] == before
    assert before[-2] not in ids[len(before) :]


def test_rows_of_pixtral_end_with_tokens(tmp_path: Path) -> None:
    """Its patches are not merged."""
    read = read_model({**PIXTRAL, "image_token_id": 9}, PROCESSOR_PIXTRAL)
    assert read.vision is not None
    assert read.vision.patching.most == (81, 81)
    folder = write_pixtral(tmp_path, PIXTRAL)
    brk, img, end = MARKS_PIXTRAL
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(1, 10, 7))}}]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
        shown = f"<|im_start|>user\n{img * 3}{brk}{img * 3}{end}"
        before = llm.get_tokenizer().encode(shown, parse_special=True)
    assert output.prompt_token_ids[: len(before)] == before


def test_names_may_be_those_that_were_published(asked: Asked, tmp_path: Path) -> None:
    """Older versions of transformers have other modules around the parts."""
    for file in asked.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    older = {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    arrays = {}
    for name, array in load_file(asked.folder / "model.safetensors").items():
        begin = next(begin for begin in older if name.startswith(begin))
        arrays[older[begin] + name.removeprefix(begin)] = array
    unused = "vision_tower.vision_model.encoder.layers.2.mlp.fc1.bias"  # of the last layer
    save_file({**arrays, unused: np.ones(48, np.float32)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert answer(Asked(tmp_path, IMG, 30, 20).ask()) == answer(asked.ask())


def test_the_size_of_steps_changes_no_bit(asked: Asked) -> None:
    asked.check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(asked: Asked) -> None:
    asked.check_company(SMALL_CACHE)


def test_without_images_the_tower_is_left_out(asked: Asked) -> None:
    asked.check_texts()
