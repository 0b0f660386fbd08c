"""Images of Llama 4 as transformers sees them, on a canvas that is cut into tiles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.images.sizes import CanvasTiles
from quire.models import read_model
from quire.models.vision_llama4 import MARKS
from quire.types import PromptImage
from quire.weights.folder import ModelFolder

TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,  # four patches
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
}
PROCESSOR = {
    "size": {"height": 24, "width": 24},
    "max_patches": 6,
    "image_mean": [0.4] * 3,
    "image_std": [0.6] * 3,
}
# 2 x 2 tiles with an overview, 3 x 2, 1 x 4, and one part
IMAGES = ((25, 30), (77, 50), (3, 90), (7, 6))


def write(folder: Path) -> Any:
    """Save a tiny model with random weights. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.Llama4Config(
        text_config=TEXT, vision_config=VISION, image_token_index=IMAGE, attn_implementation="eager"
    )
    model = transformers.Llama4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name and name.endswith("weight")))
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return model.eval()


def given(parts: list[PromptImage]) -> dict[str, Any]:
    """What the model takes of resized parts, as their processor computes it."""
    pixels = torch.stack([torch.tensor(pixels_of(part).copy()).permute(2, 0, 1) for part in parts])
    mean, std = (torch.tensor(value, dtype=torch.bfloat16) for value in (0.4, 0.6))
    return {"pixel_values": ((pixels.bfloat16() * (1 / 255) - mean) / std).float()}


def test_images_of_llama4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that end within tiles and between them."""
    outputs = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    monkeypatch.setattr(outputs, "image_outputs", None, raising=False)  # which the class expects there
    theirs, source = write(tmp_path), ModelFolder.at(tmp_path)
    model = read_model(source.config(), PROCESSOR)
    vision = model.vision
    assert vision is not None
    ids, ours = prompt([picture(*size, seed=1) for size in IMAGES], vision)
    assert len(ours) == 5 + 7 + 5 + 1
    assert all(one.end < other.first for one, other in pairwise(ours))  # with marks between
    check_answers(theirs, given(ours), source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 13, 5, 1, 3)], rest=9)


@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 2)], ids=str)
def test_marks_of_the_processor(grid: tuple[int, int]) -> None:
    theirs = transformers.Llama4Processor.__new__(transformers.Llama4Processor)
    tiles = grid[0] * grid[1]
    *before, after = MARKS.around(*grid, tiles + (tiles > 1))
    written = "".join(mark + "<|patch|>" * 4 for mark in before) + after
    assert written == theirs._prompt_split_image(grid, 4)


@pytest.fixture
def processors() -> Any:
    """The module of transformers' processor."""
    pytest.importorskip("torchvision")  # transformers resizes these images with nothing else
    from transformers.models.llama4 import image_processing_llama4

    return image_processing_llama4


def test_parts_of_the_processor(processors: Any, tmp_path: Path) -> None:
    write(tmp_path)
    vision = read_model(ModelFolder.at(tmp_path).config(), PROCESSOR).vision
    assert vision is not None
    images = [picture(*size, seed=1) for size in IMAGES]
    _, ours = prompt(images, vision)
    found = processors.Llama4ImageProcessor(**PROCESSOR)(images, return_tensors="pt")["pixel_values"]
    assert found.dtype == torch.bfloat16
    for own, theirs in zip(given(ours)["pixel_values"], found.float(), strict=True):
        levels = (own - theirs).abs() * 0.6 * 255
        assert levels.max() < 2.01  # torch rounds in other ways than Pillow, before halves are rounded
        assert levels.mean() < 0.5
    patches = np.concatenate([vision.patching.patches(pixels_of(part))[:-1, :48] for part in ours])
    expected = given(ours)["pixel_values"].unflatten(3, (3, 2, 4)).unflatten(2, (3, 2, 4))
    expected = expected.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(patches), 48)
    assert np.array_equal(patches, expected.numpy())


@pytest.mark.parametrize(("side", "tiles"), [(336, 16), (336, 4), (448, 6)])
def test_sizes_of_the_processor(processors: Any, side: int, tiles: int) -> None:
    square = transformers.image_utils.SizeDict(height=side, width=side)
    canvases = torch.tensor(processors.find_supported_resolutions(tiles, square))
    rule, rng = CanvasTiles(side, tiles), np.random.default_rng(side)
    sizes = (2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist()
    sizes += [(by * 4, by * 3) for by in range(90, 600)] + [(by, by * 2) for by in range(180, 900)]
    for height, width in sizes:
        canvas = processors.get_best_fit((height, width), canvases)
        most = (min(max(own, side), of) for own, of in zip((height, width), canvas, strict=True))
        size = processors.get_max_res_without_distortion((height, width), tuple(most))
        cut = rule.cut(height, width)
        assert cut.canvas == tuple(canvas.tolist())
        assert cut.size == tuple(max(int(one), 1) for one in size)
