"""Images of PaddleOCR-VL as transformers sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import END, IMAGE, START, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.images.sizes import KeptShape
from quire.models import read_model
from quire.weights.folder import ModelFolder

MARKS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 26,  # 6 x 6 learned positions
    "patch_size": 4,
}
TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 4, 5]},
}
# Larger and smaller than the learned positions, and one whose lower side has less than a token
IMAGES = ((37, 61), (90, 20), (6, 30))
SIZES = {"size": {"shortest_edge": 64 * 4, "longest_edge": 64 * 40}, "patch_size": 4}


def processor() -> Any:
    from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddleocr_vl

    made = paddleocr_vl.PaddleOCRVLImageProcessorPil
    return made(**SIZES, image_mean=[0.5] * 3, image_std=[0.4] * 3)


def write(folder: Path) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.PaddleOCRVLConfig(text_config=TEXT, vision_config=VISION, **MARKS)
    model = transformers.PaddleOCRVLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model.eval()


def test_images_of_paddleocr(tmp_path: Path) -> None:
    """In chunks that end within images and between them."""
    theirs, source = write(tmp_path), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    ids, ours = prompt(images, vision)
    given = processor()(images=images, return_tensors="pt")
    expected = iter(given["pixel_values"].numpy())  # row by row, as ours are not
    for own in ours:
        patches = vision.patching.patches(pixels_of(own))
        order = np.lexsort(patches[:, :-3:-1].T)  # by row, then column
        for patch in patches[order]:
            assert np.abs(patch[:48] - next(expected).ravel()).max() < 1e-6
    assert next(expected, None) is None

    how = {**given, "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int()}
    check_answers(theirs, how, source, model, ids, ours, [(2, 7, 1, 1, 19)], rest=33)


@pytest.mark.parametrize(("least", "most"), [(147384, 2822400), (784, 78400)])
def test_sizes_of_the_processor(least: int, most: int) -> None:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

    rule, compared = KeptShape(28, least, most, "twice"), 0
    rng = np.random.default_rng(most)
    for height, width in (2 ** rng.uniform(0, 13, (5000, 2))).astype(int).tolist():
        try:
            expected = smart_resize(height, width, 28, least, most)
        except ValueError:
            with pytest.raises(ValueError, match="too narrow"):
                rule.of(height, width)
            continue
        if expected[0] * expected[1] <= most:  # theirs may have more if they are narrow
            assert rule.of(height, width) == expected
            compared += 1
    assert compared > 3000
