"""Images of Idefics3 and SmolVLM as transformers sees them, which are cut into tiles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.images.sizes import SquareTiles
from quire.models import read_model
from quire.models.vision_idefics3 import MARKS
from quire.weights.folder import ModelFolder

TEXT = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
VISION = {  # of the 26 pixels of a side, 24 are in patches
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 26,
    "patch_size": 4,
}
SIZES = {"size": {"longest_edge": 78}, "max_image_size": {"longest_edge": 26}}
# Of 2 x 3 tiles, 3 x 1 of a narrow one, and 3 x 3
IMAGES = ((30, 40), (90, 3), (7, 6))


def processor(kind: str, **changes: Any) -> Any:
    from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3
    from transformers.models.smolvlm import image_processing_pil_smolvlm as smolvlm

    module = smolvlm if kind == "SmolVLM" else idefics3
    made = getattr(module, f"{kind}ImageProcessorPil")
    return made(**SIZES, image_mean=[0.4] * 3, image_std=[0.6] * 3, return_row_col_info=True, **changes)


def write(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    parts = {"text_config": TEXT, "vision_config": VISION}
    config = getattr(transformers, f"{kind}Config")(**parts, image_token_id=IMAGE, scale_factor=3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name and name.endswith("weight")))
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor(kind, **changes).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Idefics3", {}), ("SmolVLM", {}), ("SmolVLM", {"do_image_splitting": False, "resample": 2})],
    ids=str,
)
def test_images_of_idefics3(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In chunks that end within tiles and between them."""
    theirs, source = write(kind, tmp_path, **changes), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(*size, seed=1) for size in IMAGES]
    ids, ours = prompt(images, vision)
    assert all(one.end < other.first for one, other in pairwise(ours))  # with marks between
    given = processor(kind, **changes)(images=[images], return_tensors="pt")
    assert given["rows"] == [[0, 0, 0] if changes else [3, 3, 3]]
    for part, expected in zip(ours, given["pixel_values"][0].numpy(), strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(part)).transpose(2, 0, 1)
        assert np.abs(pixels - expected).max() < 1e-6

    how = {name: given[name] for name in ("pixel_values", "pixel_attention_mask")}
    check_answers(theirs, how, source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 13, 5, 1, 3)], rest=9)


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 2)], ids=str)
def test_marks_of_the_processor(grid: tuple[int, int]) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    *before, after = MARKS.around(max(grid[0], 1), max(grid[1], 1), grid[0] * grid[1] + 1)
    written = "".join(mark + "<image>" * 4 for mark in before) + after
    names = "<fake_token_around_image>", "<image>", "<global-img>"
    assert written == get_image_prompt_string(*grid, 4, *names)


@pytest.mark.parametrize(("longest", "side"), [(2048, 512), (1456, 364), (1536, 384)])
def test_sizes_of_the_processor(longest: int, side: int) -> None:
    theirs = processor("Idefics3")
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    rule = SquareTiles(longest, side, (longest // side) ** 2 + 1)
    rng = np.random.default_rng(longest)
    for height, width in (2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist():
        cut = rule.cut(height, width)
        count = theirs.get_number_of_image_patches(height, width, sizes)
        assert (cut.rows * cut.columns + 1, cut.rows, cut.columns) == count
