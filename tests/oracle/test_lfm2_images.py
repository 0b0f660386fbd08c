"""Images of LFM2-VL as transformers sees them, of which large ones are cut into tiles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.images.sizes import Cut, Tiles
from quire.models import read_model
from quire.models.vision_lfm2 import MARKS
from quire.types import PromptImage
from quire.weights.folder import ModelFolder

TEXT = {
    "model_type": "lfm2",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
VISION = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 25,
}
PROCESSOR = {
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "max_image_tokens": 12,
    "tile_size": 24,
    "max_tiles": 6,
    "image_mean": [0.4] * 3,
    "image_std": [0.6] * 3,
    "resample": 2,
}
# One part, 3 x 2 tiles with an overview, a narrow one, and a small one
IMAGES = ((25, 30), (77, 50), (3, 90), (7, 6))


def write(folder: Path, **changes: Any) -> Any:
    """Save a tiny model with random weights. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.Lfm2VlConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, projector_hidden_size=40, **changes
    )
    model = transformers.Lfm2VlForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name and name.endswith("weight")))
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return model.eval()


def given(parts: list[PromptImage]) -> dict[str, Any]:
    """What the model takes of resized parts: patches, row by row, filled up to the most of one."""
    most = 4 * max(part.num_tokens for part in parts)
    values, masks = torch.zeros(len(parts), most, 48), torch.zeros(len(parts), most, dtype=torch.int32)
    for number, part in enumerate(parts):
        pixels = (torch.tensor(pixels_of(part).copy()) / 255 - 0.4) / 0.6
        cut = pixels.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).transpose(1, 2).flatten(2).flatten(0, 1)
        values[number, : len(cut)], masks[number, : len(cut)] = cut, 1
    shapes = torch.tensor([[2 * part.rows, 2 * part.columns] for part in parts])
    return {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": masks}


@pytest.mark.parametrize(
    "changes", [{}, {"projector_use_layernorm": False, "projector_bias": False}], ids=str
)
def test_images_of_lfm2(changes: dict[str, Any], tmp_path: Path) -> None:
    """In chunks that end within tiles and between them."""
    theirs, source = write(tmp_path, **changes), ModelFolder.at(tmp_path)
    model = read_model(source.config(), PROCESSOR)
    vision = model.vision
    assert vision is not None
    ids, ours = prompt([picture(*size, seed=1) for size in IMAGES], vision)
    assert len(ours) == 1 + 7 + 1 + 1
    assert all(one.end < other.first for one, other in pairwise(ours))  # with marks between
    check_answers(theirs, given(ours), source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 13, 5, 1, 3)], rest=9)


@pytest.mark.parametrize("overview", [True, False])
@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 2)], ids=str)
def test_marks_of_the_processor(grid: tuple[int, int], overview: bool) -> None:
    theirs = transformers.Lfm2VlProcessor.__new__(transformers.Lfm2VlProcessor)
    theirs.image_token, theirs.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
    theirs.image_start_token, theirs.image_end_token = "<|image_start|>", "<|image_end|>"
    tiles = grid[0] * grid[1]
    sizes = [4] * tiles + [6] * overview if tiles > 1 else [6]
    *before, after = MARKS.around(*grid, len(sizes))
    written = "".join(mark + "<image>" * size for mark, size in zip(before, sizes, strict=True)) + after
    assert written == theirs._build_image_tokens(*grid, 4, 6, overview, True)


@pytest.fixture
def processor() -> Any:
    pytest.importorskip("torchvision")  # transformers resizes these images with nothing else
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    return Lfm2VlImageProcessor(**PROCESSOR)


@pytest.mark.parametrize("overview", [True, False])
def test_parts_of_the_processor(processor: Any, overview: bool, tmp_path: Path) -> None:
    write(tmp_path)
    vision = read_model(ModelFolder.at(tmp_path).config(), {**PROCESSOR, "use_thumbnail": overview}).vision
    assert vision is not None
    images = [picture(*size, seed=1) for size in IMAGES]
    _, ours = prompt(images, vision)
    found = processor(images, use_thumbnail=overview, return_tensors="pt")
    assert [[2 * part.rows, 2 * part.columns] for part in ours] == found["spatial_shapes"].tolist()
    for values, theirs in zip(given(ours)["pixel_values"], found["pixel_values"], strict=True):
        levels = (values - theirs[: len(values)]).abs() * 0.6 * 255
        assert levels.max() < 1.01  # torch rounds in other ways than Pillow
        assert levels.mean() < 0.5


@pytest.mark.parametrize("most", [2, 3, 10])
def test_sizes_of_the_processor(processor: Any, most: int) -> None:
    """Of images that have at most as many tokens as are asked for; transformers gives narrow ones more."""
    rule = Tiles(16, 32, 64, 256, 512, 2, most, 2.0, True)
    rng = np.random.default_rng(most)
    for height, width in (2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist():
        whole = processor.smart_resize(height, width, 2, 64, 256, 16)[::-1]
        if whole[0] * whole[1] > 256 * 32**2:
            continue
        expected = Cut(whole)
        if processor._is_image_too_large(height, width, 256, 16, 2, 2.0):
            columns, rows, *size, _ = processor._get_grid_layout(height, width, 2, most, 512)
            expected = Cut(tuple(size[::-1]), rows, columns, whole)
        assert rule.cut(height, width) == expected
