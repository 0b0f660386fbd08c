"""Images of Qwen2-VL and Qwen2.5-VL: windows of patches, their places in prompts, and what is refused."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver
from safetensors.numpy import load_file, save_file
from seeing import Seeing, compute, weights_of
from tiny_vision import CONFIG2, CONFIG25, MARKS, PROCESSOR, flat, picture, write_qwen3_vl

from quire import LLM, SamplingParams
from quire.backends.reference import ReferenceBackend
from quire.backends.slot_images import patches_of, pixels_of, windows_of
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.images.windows import Windows
from quire.models import Model, read_model
from quire.outputs import RequestOutput
from quire.program import ops
from quire.program.passes import fuse
from quire.program.program import Load
from quire.program.rope import Rope
from quire.types import ImageSlice, PromptImage

VOCAB, TOKEN, WORK = 64, 60, 40
KINDS = {"qwen2_vl": CONFIG2, "qwen2_5_vl": CONFIG25}


def read(config: dict[str, Any], processor: dict[str, Any] = PROCESSOR, **tower: Any) -> Model:
    config = copy.deepcopy({**config, "image_token_id": TOKEN})
    config["text_config"]["vocab_size"] = VOCAB
    config["vision_config"] |= tower
    return read_model(config, processor)


def tower(config: dict[str, Any], processor: dict[str, Any] = PROCESSOR, **changes: Any) -> Vision:
    vision = read(config, processor, **changes).vision
    assert vision is not None
    return vision


def image(first: int, rows: int, columns: int, seed: int) -> PromptImage:
    height, width = 8 * rows, 8 * columns
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return PromptImage(first, rows, columns, height, width, pixels.tobytes(), work=WORK)


@cache
def model(name: str) -> Seeing:
    """A prompt of 70 tokens with two images, of more than a window and of less."""
    found = read(KINDS[name])
    assert found.vision is not None
    program, vision = fuse(found.program), found.vision
    images = image(5, 4, 5, seed=1), image(40, 2, 7, seed=2)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, TOKEN, 70)]
    for one in images:
        ids[one.first : one.end] = [TOKEN] * one.num_tokens
    return Seeing(program, vision, weights_of(program, vision), images, ids)


def on(of: Seeing, vision: Vision | None = None) -> Driver:
    size = {**of.size, "vision": vision or of.vision}
    return Driver(of.program, ReferenceBackend(of.program, of.weights, **size, num_slots=3))


def scores(of: Seeing, run: Driver, *chunks: int, beside: bool = False) -> dict[int, Any]:
    """What the prompt predicts at each position, in chunks and then the rest, and eight tokens after it."""
    sequence = run.admit(0, of.ids, images=of.images)
    other = run.admit(1, of.ids[60:]) if beside else None
    compute(run, sequence, len(of.ids) + 8, chunks, other)
    return sequence.scores()


@pytest.mark.parametrize("name", KINDS)
def test_any_chunks_neighbours_and_slices_give_the_same_bits(name: str) -> None:
    of = model(name)
    expected = scores(of, on(of))
    assert scores(of, on(of), 9, 7, 3, 25, beside=True) == expected
    run = on(of)
    text, sequence = run.admit(1, of.ids[60:]), run.admit(0, of.ids, images=of.images)
    run.step((text, 10), (sequence, 5))
    for begin, end in ((0, 11), (11, 27), (27, 40)):
        run.step((text, 1), image_slice=ImageSlice("r0", of.images[0], begin, end))
    run.step((text, 1), (sequence, len(of.ids) - 5))
    found = sequence.scores()
    assert len(found) == len(of.ids)
    assert found == {position: expected[position] for position in found}


def test_windows_change_what_is_seen() -> None:
    """Windows as large as an image are none."""
    of = model("qwen2_5_vl")
    expected = scores(of, on(of))
    large = tower(CONFIG25, window_size=800)
    assert large.windows == Windows(100, 4)
    found = scores(of, on(of, large))
    assert [position for position in expected if found[position] != expected[position]] == [*range(6, 78)]
    whole = tower(CONFIG25, window_size=800, fullatt_block_indexes=[0, 1, 2])
    assert found == scores(of, on(of, whole))


def test_windows_follow_one_another() -> None:
    """Worked by hand: 4 x 5 tokens in squares of 3 x 3."""
    windows = Windows(3, 4)
    first = [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert windows.order(4, 5).tolist() == [*first, 3, 4, 8, 9, 13, 14, 15, 16, 17, 18, 19]
    assert windows.offsets(4, 5).tolist() == [0, 36, 60, 72, 80]
    assert windows.most == 36
    assert (windows.order(4, 5)[windows.places(4, 5)] == np.arange(20)).all()
    assert windows.offsets(3, 3).tolist() == [0, 36]
    assert windows.offsets(1, 7).tolist() == [0, 12, 24, 28]


def test_patches_are_in_the_order_of_windows() -> None:
    one, vision = image(0, 4, 5, seed=1), tower(CONFIG25)
    plain = vision.patching.patches(pixels_of(one))
    assert plain.shape == (80, 2 * 3 * 16 + 2)
    found = patches_of(vision, one)
    assert np.array_equal(found[:36, -2:].max(axis=0), [5, 5])
    assert np.array_equal(found[36:60, -2:].min(axis=0), [0, 6])
    begins, places = windows_of(vision, one)
    assert begins == [0, 36, 60, 72, 80]
    assert np.array_equal(found.reshape(20, -1)[places], plain.reshape(20, -1))
    assert windows_of(tower(CONFIG2), one) == ([], [])
    assert np.array_equal(patches_of(tower(CONFIG2), one), plain)


def test_work_within_windows_is_counted_so() -> None:
    layers = [op for op in tower(CONFIG25).program if isinstance(op, ops.RowAttention)]
    assert [op.window for op in layers] == [36, None, 36]
    load = Load(((0, 400),), 100)
    assert [op.flops(load) for op in layers] == [4 * 32 * 400 * seen for seen in (36, 400, 36)]


def test_pairs_of_a_head_rotate_in_chunks() -> None:
    ropes = {op.rope for op in read(CONFIG2).program if isinstance(op, ops.Rotary)}
    (rope,) = ropes
    assert rope.axes.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert (rope.theta, rope.rope_type) == (1e6, "default")
    text = read_model({**flat(CONFIG2), "vocab_size": VOCAB})
    assert {op.rope for op in text.program if isinstance(op, ops.Rotary)} == {
        Rope(16, 1e6, original_max_position=2048)
    }


@pytest.mark.parametrize("name", KINDS)
def test_older_files_have_the_fields_of_the_text_model_beside_others(name: str) -> None:
    nested = read(KINDS[name])
    older = read_model({**flat(KINDS[name]), "vocab_size": VOCAB, "image_token_id": TOKEN}, PROCESSOR)
    assert nested.vision is not None
    assert older.vision is not None
    assert repr([*older.program]) == repr([*nested.program])
    assert repr([*older.vision.program]) == repr([*nested.vision.program])
    assert older.program.left_out == ()
    unstated = {key: value for key, value in flat(KINDS[name]).items() if key != "vision_config"}
    assert read_model(unstated, PROCESSOR).vision is None
    (part,) = read_model(flat(KINDS[name])).program.left_out
    assert part.stated


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIG25, {"window_size": 7}, "windows of 7 pixels, less than a token has, are not supported"),
        (CONFIG25, {"window_size": "112"}, "window_size = '112' is not a size"),
        (CONFIG25, {"fullatt_block_indexes": "all"}, "fullatt_block_indexes is not a list"),
        (CONFIG25, {"num_heads": 3}, "32 numbers in 3 heads are not supported"),
        (CONFIG2, {"in_channels": 1}, "32 numbers in 2 heads are not supported"),
        (CONFIG2, {"hidden_act": "gulp"}, "gulp"),
        (CONFIG2, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = .* are not supported"),
        (
            CONFIG2,
            {"processor": {**PROCESSOR, "patch_size": 14}},
            "patch_size = 14, but the vision tower has 4",
        ),
        (
            CONFIG2,
            {"processor": {**PROCESSOR, "merge_size": 1}},
            "merge_size = 1, but the vision tower has 2",
        ),
        (CONFIG2, {"processor": {**PROCESSOR, "max_pixels": "x"}}, "'x' is not a number of pixels"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower(config, **changes)


@pytest.mark.parametrize("sections", [[2, 3, 2], [8, 0, 1], [9, -1, 0], [8]])
def test_sections_that_are_not_those_of_a_head(sections: list[int]) -> None:
    config = copy.deepcopy(CONFIG2)
    config["text_config"]["rope_scaling"]["mrope_section"] = sections
    with pytest.raises(ConfigError, match="mrope_section = "):
        read(config)


BEGIN, PAD, END = MARKS
SETTINGS: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "device": "reference"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Published as they were, with older names of tensors too."""
    found = {}
    for name, config in KINDS.items():
        found[name] = write_qwen3_vl(tmp_path_factory.mktemp(name), flat(config))
        arrays = load_file(found[name] / "model.safetensors")
        older = {key.replace("model.visual.", "visual."): array for key, array in arrays.items()}
        assert older.keys() != arrays.keys()
        save_file(older, found[name] / "model.safetensors", {"format": "pt"})
    return found


def answers(folder: Path, prompts: list[Any], **how: Any) -> tuple[list[Any], list[RequestOutput]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with LLM(str(folder), **{**SETTINGS, "kv_cache_memory_bytes": 1 << 22, **how}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
    found = [[(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in of] for of in (outputs, again)]
    assert found[0] == found[1]
    return found[0], again


def prompt(*seeds: int) -> Any:
    """A text with pictures of 5 x 4 tokens."""
    shown = "".join(f"So it is: {BEGIN}{PAD}{END}" for _ in seeds)
    pictures = {"image": [picture(seed, 40, 32) for seed in seeds]}
    return {"prompt": f"{shown}What is it?", "trusted": True, "multi_modal_data": pictures}


@pytest.mark.parametrize("name", KINDS)
def test_caches_and_neighbours_change_no_bit(name: str, folders: dict[str, Path]) -> None:
    prompts = [prompt(1, 2), prompt(1, 3), prompt(2)]
    expected = [answers(folders[name], [one], enable_prefix_caching=False)[0][0] for one in prompts]
    assert expected[0] != expected[1]
    found, outputs = answers(folders[name], prompts, max_num_batched_tokens=17)
    assert found == expected
    assert all(one.num_cached_tokens for one in outputs)


def test_an_older_processor_states_numbers_of_pixels(folders: dict[str, Path]) -> None:
    stated = {key: value for key, value in PROCESSOR.items() if key != "size"}
    config = json.loads((folders["qwen2_vl"] / "config.json").read_text())
    vision = read_model(config, {**stated, "min_pixels": 512, "max_pixels": 640}).vision
    assert vision is not None
    unstated = {**PROCESSOR, "min_pixels": None, "max_pixels": None}
    assert tower(CONFIG2, unstated).patching.size == tower(CONFIG2).patching.size
    assert vision.patching.size.of(100, 10) == (80, 8)
    assert vision.patching.most == (40, 10)
