"""Images of Llava as transformers sees them, by each of its towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.config import EngineConfig
from quire.description import describe
from quire.models import read_model
from quire.weights.folder import ModelFolder

TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}
CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 12}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "image_size": 14}  # of which 12 are in patches
PIXTRAL = {**VISION, "model_type": "pixtral", "hidden_act": "silu"}
ALL: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", CLIP, {}),
    ("qwen2", CLIP, {"vision_feature_layer": 1, "multimodal_projector_bias": False}),
    ("mistral", CLIP, {"vision_feature_layer": [-1], "tie_word_embeddings": True}),
    ("qwen2", SIGLIP, ALL),
    ("mistral", PIXTRAL, {**ALL, "projector_hidden_act": "gelu_pytorch_tanh"}),
]


def processor(vision: dict[str, Any]) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    if vision is PIXTRAL:
        return PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size={"height": 4, "width": 4})
    if vision is SIGLIP:
        return SiglipImageProcessorPil(size={"height": 14, "width": 14})
    return CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})


def write(folder: Path, kind: str, vision: dict[str, Any], **whole: Any) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": kind}, vision_config=vision, image_token_index=IMAGE, **whole
    )
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor(vision).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("kind", "tower", "whole"), CASES, ids=lambda one: str(one)[:40])
def test_images_of_llava(kind: str, tower: dict[str, Any], whole: dict[str, Any], tmp_path: Path) -> None:
    """Images of which CLIP's processor takes the middle, in chunks that end within them."""
    theirs, source = write(tmp_path, kind, tower, **whole), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    describe(EngineConfig(model=str(tmp_path)))  # every tensor has its use
    images = [picture(37, 30, seed=0), picture(20, 91, seed=1), picture(6, 5, seed=2)]
    ids, ours = prompt(images, vision)
    given = processor(tower)(images=images, return_tensors="pt")
    for image, expected in zip(ours, given["pixel_values"].numpy(), strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(image)).transpose(2, 0, 1)
        own = expected[:, : image.height, : image.width]  # others are padded
        assert np.abs(pixels - own).max() < 1e-6

    check_answers(theirs, given, source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 6, 5, 1, 3)])
