"""Images of PaddleOCR-VL: files as they were published, places of patches, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import Asked, answer, tower_of
from safetensors.numpy import load_file, save_file
from tiny_vision import CONFIG_PADDLE, MARKS_PADDLE, PROCESSOR_PADDLE, flat, write_paddleocr_vl

from quire.errors import ConfigError
from quire.images.learned import Learned
from quire.images.patches import MergedPatches
from quire.images.sizes import KeptShape
from quire.images.vision import Vision
from quire.models import read_model
from quire.program import ops
from quire.program.rope import Rope

SMALL_CACHE = 64_000  # bytes of a cache for one request and a little more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_paddleocr_vl(tmp_path_factory.mktemp("paddleocr_vl"))


def asked(folder: Path) -> Asked:
    return Asked(folder, "".join(MARKS_PADDLE), 40, 32)


def tower(processor: dict[str, Any] | None = None, **changes: Any) -> Vision:
    return tower_of(CONFIG_PADDLE, PROCESSOR_PADDLE | (processor or {}), **changes)


def test_patches_have_pixels_positions_and_places() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    patching = tower().patching
    assert isinstance(patching, MergedPatches)
    assert patching.learned == Learned(5)
    assert patching.size == KeptShape(8, 256, 4096, "twice")
    patches, values = patching.patches(pixels), patching.normalization.apply(pixels)
    assert patches.shape == (24, 48 + 8 + 2)
    order = [
        (y, x) for row in (0, 2) for column in (0, 2, 4) for y in (row, row + 1) for x in (column, column + 1)
    ]
    assert patches[:, -2:].tolist() == [[y, x] for y, x in order]
    for number, (y, x) in enumerate(order):
        cut = values[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patches[number, :48], cut.reshape(-1))
    np.testing.assert_allclose(patches[:, 52:56].sum(axis=1), 1, rtol=1e-6)


def test_sizes_and_the_token_have_the_defaults_of_their_classes() -> None:
    unstated = {"min_pixels": None, "max_pixels": None, "patch_size": None}
    vision = tower({**unstated, "patch_size": 4})
    assert vision.token == 100295
    patching = vision.patching
    assert isinstance(patching, MergedPatches)
    assert (patching.min_pixels, patching.max_pixels, patching.frames) == (384**2, 1536**2, 1)


def test_text_rotates_by_three_positions_if_it_sees() -> None:
    found = read_model(CONFIG_PADDLE, PROCESSOR_PADDLE)
    (rope,) = {op.rope for op in found.program if isinstance(op, ops.Rotary)}
    assert rope == Rope(24, 500_000.0, original_max_position=2048, sections=(3, 4, 5), in_chunks=True)


def test_files_as_they_were_published(folder: Path, tmp_path: Path) -> None:
    """With fields of the text model beside others, other names, and tensors that are not used."""
    other = write_paddleocr_vl(tmp_path, flat(CONFIG_PADDLE))
    assert read_model(flat(CONFIG_PADDLE)).program.left_out[0].stated
    names = {"model.visual.": "visual.", "model.projector.": "mlp_AR."}
    arrays = load_file(folder / "model.safetensors")
    for new, old in names.items():
        arrays = {name.replace(new, old): array for name, array in arrays.items()}
    arrays["visual.vision_model.head.probe"] = np.zeros((1, 1, 24), np.float32)
    arrays["visual.vision_model.embeddings.packing_position_embedding.weight"] = np.zeros((9, 24), np.float32)
    save_file(arrays, other / "model.safetensors", {"format": "pt"})
    assert answer(asked(other).ask()) == answer(asked(folder).ask())
    assert answer(asked(other).ask(images=(), max_images=0)) == answer(asked(folder).ask(images=()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 4}, "24 numbers in 4 heads, 5 positions of a side are not supported"),
        ({"num_channels": 1}, "not supported"),
        ({"image_size": 3}, "0 positions of a side are not supported"),
        ({"hidden_act": "gulp"}, "gulp"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        ({"processor": {"patch_size": 14}}, "patch_size = 14, but the vision tower has 4"),
        ({"processor": {"merge_size": 1}}, "merge_size = 1, but the vision tower has 2"),
        ({"processor": {"temporal_patch_size": 2}}, "temporal_patch_size = 2, but the vision tower has 1"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
        ({"processor": {"max_pixels": "x"}}, "'x' is not a number of pixels"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_biases_are_refused() -> None:
    text = {**CONFIG_PADDLE["text_config"], "use_bias": True}
    with pytest.raises(ConfigError, match="use_bias = True is not supported"):
        read_model({**CONFIG_PADDLE, "text_config": text}, PROCESSOR_PADDLE)


def test_the_size_of_steps_changes_no_bit(folder: Path) -> None:
    asked(folder).check_steps()


def test_caches_neighbours_and_preemption_change_no_bit(folder: Path) -> None:
    asked(folder).check_company(SMALL_CACHE)


def test_texts_have_the_same_answers_without_the_tower(folder: Path) -> None:
    asked(folder).check_texts()
