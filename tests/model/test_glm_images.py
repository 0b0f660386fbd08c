"""Images of GLM-4.1V, 4.5V, 4.6V and GLM-OCR: their learned positions, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import Asked, answer, tower_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_vision import CONFIG_GLM4V, CONFIG_GLM_OCR, MARKS_GLM, PROCESSOR_GLM, write_glm4v

from quire.errors import ConfigError
from quire.images.learned import Learned
from quire.images.patches import MergedPatches
from quire.images.sizes import KeptShape
from quire.images.vision import Vision
from quire.models import read_model
from quire.program import ops
from quire.program.rope import Rope
from quire.quantize.kinds import Dense
from quire.weights.load import canonical

BEGIN, IMAGE, END = MARKS_GLM
SMALL_CACHE = 40_000  # bytes of a cache for one request and a little more
MOE = "Glm4vMoeForConditionalGeneration"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"glm4v": CONFIG_GLM4V, "glm_ocr": CONFIG_GLM_OCR}
    return {name: write_glm4v(tmp_path_factory.mktemp(name), of) for name, of in configs.items()}


def asked(folder: Path) -> Asked:
    return Asked(folder, "".join(MARKS_GLM), 40, 32)


def tower(processor: dict[str, Any] | None = None, config: Any = CONFIG_GLM4V, **changes: Any) -> Vision:
    config = {**config, "image_token_id": 9}
    return tower_of(config, PROCESSOR_GLM | (processor or {}), **changes)


def test_positions_are_stretched_between_edges() -> None:
    """A grid as large as the learned one has these; one place is in the middle of all."""
    for cubic in (False, True):
        learned, number = Learned(3, cubic), 16 if cubic else 4
        y, x = np.indices((3, 3)).reshape(2, -1)
        mixed = np.stack(learned.mixed(y, x), axis=1)
        assert mixed.shape == (9, 2 * number)
        shares = np.zeros((9, 9))
        for at, (rows, factors) in enumerate(zip(mixed[:, :number], mixed[:, number:], strict=True)):
            np.add.at(shares[at], rows.astype(int), factors)
        np.testing.assert_allclose(shares, np.eye(9), atol=1e-12)
    rows = Learned(4, cubic=True).mixed(np.array([0]), np.array([0]))
    assert [int(row[0]) for row in rows[:16]] == list(range(16))
    assert sum(factor[0] for factor in rows[16:]) == pytest.approx(1)
    assert rows[16 + 5][0] == pytest.approx(0.59375**2)  # of Keys' kernel half way, 19/32 and -3/32
    assert rows[16][0] == pytest.approx(0.09375**2)
    assert rows[17][0] == pytest.approx(-0.09375 * 0.59375)


def test_positions_between_two_places() -> None:
    """Worked by hand: three patches on two learned places, whose centres are at 1/4 and 3/4."""
    line = np.arange(3)
    rows = np.stack(Learned(2).mixed(line, 0 * line), axis=1)
    assert rows[:, :4].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [2, 3, 2, 3]]
    down = rows[:, 4:].reshape(3, 2, 2).sum(axis=2)
    np.testing.assert_allclose(down, [[1 / 6, 5 / 6], [0.5, 0.5], [5 / 6, 1 / 6]], atol=1e-6)
    ends = np.stack(Learned(2, ends=True).mixed(line, 0 * line), axis=1)
    assert ends[:, :4].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 3, 2, 3]]
    assert ends[:, 4:].tolist() == [[1, 0, 0, 0], [0.5, 0, 0.5, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("enlarged", "size", "expected"),
    [
        ("", (10, 300), (28, 308)),
        ("once", (10, 300), (28, 840)),
        ("twice", (10, 300), (28, 840)),
        ("once", (5, 10), (56, 84)),  # 28 x 56, then by the fewest pixels
        ("once", (100, 28), (112, 28)),
        ("twice", (10, 7), (84, 56)),
        ("once", (27, 5601), None),
        ("", (28, 5601), None),
    ],
)
def test_small_images_are_enlarged_first(enlarged: str, size: Any, expected: Any) -> None:
    rule = KeptShape(28, 4 * 28**2, 10**8, enlarged)
    if expected is None:
        with pytest.raises(ValueError, match=f"an image of {size[1]} x {size[0]} pixels is too narrow"):
            rule.of(*size)
    else:
        assert rule.of(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(["once", "twice"]))
def test_every_image_is_in_its_bounds(height: int, width: int, enlarged: str) -> None:
    rule = KeptShape(28, 4 * 28**2, 50 * 28**2, enlarged)
    try:
        rows, columns = (side // 28 for side in rule.of(height, width))
    except ValueError:
        assert max(height, width) > 190 * min(height, width)
        return
    assert 4 <= rows * columns <= 50


def test_a_convolution_of_a_square_is_a_matrix_of_its_patches() -> None:
    spec = tower().program.weights()["model.visual.downsample.weight"]
    rng = np.random.default_rng(0)
    stored, patches = rng.random((32, 32, 2, 2), np.float32), rng.random((4, 32), np.float32)
    matrix = canonical(spec, Dense(stored)).dense()
    expected = np.einsum("ocyx,yxc->o", stored, patches.reshape(2, 2, 32))
    np.testing.assert_allclose(matrix @ patches.reshape(-1), expected, rtol=1e-5)


def test_pixels_are_those_of_all_frames() -> None:
    patching = tower().patching
    assert isinstance(patching, MergedPatches)
    assert (patching.min_pixels, patching.max_pixels, patching.frames) == (256, 4096, 2)
    assert patching.most == (256, 64)
    unstated = tower({"size": None}).patching
    assert (unstated.min_pixels, unstated.max_pixels) == (112 * 56, 14 * 28 * 15000)  # type: ignore[attr-defined]
    three = tower({"temporal_patch_size": 3}, temporal_patch_size=3).patching
    assert (three.min_pixels, three.max_pixels) == (171, 2730)  # type: ignore[attr-defined]


def test_text_rotates_by_three_positions_if_it_sees() -> None:
    for config, rope in (
        (CONFIG_GLM4V, Rope(8, 1e4, True, original_max_position=2048, sections=(1, 1, 2), in_chunks=True)),
        (CONFIG_GLM_OCR, Rope(16, 1e4, True, original_max_position=2048, sections=(2, 3, 3), in_chunks=True)),
        (
            {**CONFIG_GLM4V, "architectures": [MOE]},
            Rope(8, 1e4, original_max_position=2048, sections=(1, 1, 2), in_chunks=True),
        ),
    ):
        found = read_model({**config, "image_token_id": 9}, PROCESSOR_GLM)
        assert {op.rope for op in found.program if isinstance(op, ops.Rotary)} == {rope}


def test_what_stands_for_an_image_has_the_default_of_its_class() -> None:
    configs = {
        151343: CONFIG_GLM4V,
        151363: {**CONFIG_GLM4V, "architectures": [MOE]},
        59280: CONFIG_GLM_OCR,
    }
    for token, config in configs.items():
        vision = read_model(config, PROCESSOR_GLM).vision
        assert vision is not None
        assert vision.token == token


@pytest.mark.parametrize("kind", ["glm4v_text", "glm4v_moe_text"])
def test_the_text_model_of_glm_46v_may_be_either(kind: str) -> None:
    text = {**CONFIG_GLM4V["text_config"], "model_type": kind}
    config = {**CONFIG_GLM4V, "architectures": ["Glm46VForConditionalGeneration"], "text_config": text}
    program = read_model(config, PROCESSOR_GLM).program
    assert any(isinstance(op, ops.Experts) for op in program) == (kind == "glm4v_moe_text")
    text["model_type"] = "glm4"
    with pytest.raises(ConfigError, match="the text model 'glm4' of text_config is not supported"):
        read_model(config)


def test_embeddings_may_be_tied_in_text_config() -> None:
    text = {**CONFIG_GLM4V["text_config"], "tie_word_embeddings": True}
    assert read_model({**CONFIG_GLM4V, "text_config": text}).config.tie_word_embeddings
    of_46v = {**CONFIG_GLM4V, "architectures": ["Glm46VForConditionalGeneration"], "text_config": text}
    assert not read_model(of_46v).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "32 numbers in 3 heads are not supported"),
        ({"in_channels": 1}, "not supported"),
        ({"image_size": 3}, "an image smaller than a patch is not supported"),
        ({"image_size": [24, 24]}, "is not a size"),
        ({"hidden_act": "gulp"}, "gulp"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        ({"processor": {"patch_size": 14}}, "patch_size = 14, but the vision tower has 4"),
        ({"processor": {"merge_size": 1}}, "merge_size = 1, but the vision tower has 2"),
        ({"processor": {"do_resize": False}}, "do_resize = False is not supported"),
        ({"processor": {"size": {"shortest_edge": "x"}}}, "'x' is not a number of pixels"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(**changes)


def test_sections_are_those_of_a_head() -> None:
    text = {**CONFIG_GLM4V["text_config"], "rope_scaling": {"mrope_section": [8, 12, 12]}}
    with pytest.raises(ConfigError, match=r"mrope_section = \[8, 12, 12\] is not of 4 pairs"):
        read_model({**CONFIG_GLM4V, "text_config": text}, PROCESSOR_GLM)


@pytest.mark.parametrize("name", ["glm4v", "glm_ocr"])
def test_caches_and_neighbours_change_no_bit(name: str, folders: dict[str, Path]) -> None:
    asked(folders[name]).check_steps()
    asked(folders[name]).check_company(SMALL_CACHE)


def test_texts_have_the_same_answers_without_the_tower(folders: dict[str, Path]) -> None:
    asked(folders["glm4v"]).check_texts()


def test_a_prediction_layer_is_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """GLM-OCR's checkpoint has one, and its names as transformers writes them."""
    arrays = load_file(folders["glm_ocr"] / "model.safetensors")
    for file in folders["glm_ocr"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    renamed = {
        name.replace("model.layers", "model.language_model.layers")
        .replace("model.embed_tokens", "model.language_model.embed_tokens")
        .replace("model.norm", "model.language_model.norm"): array
        for name, array in arrays.items()
    }
    renamed["model.language_model.layers.2.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["num_hidden_layers"] == 2
    assert answer(asked(tmp_path).ask()) == answer(asked(folders["glm_ocr"]).ask())
