"""Images of Gemma 3 as transformers sees them, whose tokens see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import END, IMAGE, START, check_answers, picture, prompt
from safetensors.torch import save_file

from quire.backends.slot_images import pixels_of
from quire.models import read_model
from quire.weights.folder import ModelFolder

TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
SIZE = {"height": 32, "width": 32}
MARKS = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
# Of checkpoints: as transformers saves them now, as they are published, and as newer ones are
LAYOUTS = {
    "saved": {},
    "published": {"vision_tower.": "vision_tower.vision_model."},
    "nested": {
        "vision_tower.": "model.vision_tower.vision_model.",
        "language_model.model.": "model.language_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


def write(folder: Path, layout: dict[str, str], window: int) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    text = {**TEXT, "sliding_window": window}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=16, **MARKS
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = "layer_norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    if layout:
        tensors = transformers.modeling_utils.load_state_dict(folder / "model.safetensors")
        save_file({renamed(name, layout): one for name, one in tensors.items()}, folder / "model.safetensors")
    processor().save_pretrained(folder)
    return model.eval()


def renamed(name: str, layout: dict[str, str]) -> str:
    old = next((old for old in layout if name.startswith(old)), "")
    return layout.get(old, "") + name.removeprefix(old)


def processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size=SIZE, image_mean=[0.5] * 3, image_std=[0.4] * 3)


@pytest.mark.parametrize(
    ("layout", "window"), [("saved", 6), ("published", 25), ("nested", 500)], ids=lambda value: str(value)
)
def test_images_of_gemma_3(layout: str, window: int, tmp_path: Path) -> None:
    """Two of them, with windows shorter and longer than an image, in chunks that divide neither."""
    theirs, source = write(tmp_path, LAYOUTS[layout], window), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(37, 61, seed=0), picture(90, 20, seed=1)]
    ids, ours = prompt(images, vision)
    given = processor()(images=images, return_tensors="pt")["pixel_values"]
    for image, expected in zip(ours, given.numpy(), strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(image)).transpose(2, 0, 1)
        assert np.abs(pixels - expected).max() < 1e-6

    how = {"pixel_values": given, "token_type_ids": (torch.tensor([ids]) == IMAGE).int()}
    check_answers(theirs, how, source, model, ids, ours, [(2, 18, 1, 1, 19), (4, 16, 4, 16, 3)])
