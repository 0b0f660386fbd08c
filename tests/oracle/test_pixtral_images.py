"""Images of models with Pixtral's tower as transformers sees them: Mistral's, whose rows end with tokens, and
LightOnOCR.
"""

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
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LATENT = {
    **TEXT,
    "model_type": "mistral4",
    "head_dim": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TEXTS = {
    "mistral": {**TEXT, "model_type": "mistral", "sliding_window": 7},
    "ministral3": {**TEXT, "model_type": "ministral3", "sliding_window": None},
    "mistral4": LATENT,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "hidden_act": "silu",
}


def write(kind: str, folder: Path) -> Any:
    """Save a tiny model of Mistral with random weights, and its processor. Return transformers' model."""
    config = transformers.Mistral3Config(
        text_config=TEXTS[kind],
        vision_config=VISION,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        multimodal_projector_bias=kind != "mistral",
    )
    return save(transformers.Mistral3ForConditionalGeneration, config, folder, 8)


def write_lighton(folder: Path, patch: int) -> Any:
    """Save one of LightOnOCR, whose processor rounds to `patch` pixels."""
    config = transformers.LightOnOcrConfig(
        text_config={**TEXT, "model_type": "qwen3"}, vision_config=VISION, image_token_id=IMAGE
    )
    return save(transformers.LightOnOcrForConditionalGeneration, config, folder, patch)


def save(kind: Any, config: Any, folder: Path, patch: int) -> Any:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor(patch).save_pretrained(folder)
    return model.eval()


def processor(patch: int = 8) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(
        size={"longest_edge": 60}, patch_size={"height": patch, "width": patch}, image_std=[0.4] * 3
    )


def check(theirs: Any, folder: Path, patch: int) -> None:
    """Check three images, of which one is made smaller, in chunks that end within rows and between them."""
    source = ModelFolder.at(folder)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    describe(EngineConfig(model=str(folder)))  # every tensor has its use
    images = [picture(33, 27, seed=0), picture(20, 90, seed=1), picture(5, 6, seed=2)]
    ids, ours = prompt(images, vision)
    given = processor(patch)(images=images, return_tensors="pt")
    for image, expected, size in zip(ours, given["pixel_values"].numpy(), given["image_sizes"], strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(image)).transpose(2, 0, 1)
        assert pixels.shape[1:] == tuple(size)
        assert np.abs(pixels - expected[:, : size[0], : size[1]]).max() < 1e-6

    check_answers(theirs, given, source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 6, 5, 1, 3)])


@pytest.mark.parametrize("kind", TEXTS)
def test_images_of_mistral(kind: str, tmp_path: Path) -> None:
    check(write(kind, tmp_path), tmp_path, 8)


@pytest.mark.parametrize("patch", [8, 4])
def test_images_of_lighton_ocr(patch: int, tmp_path: Path) -> None:
    """Rounded to patches alone, they have some that are in no square; no token is between their rows."""
    check(write_lighton(tmp_path, patch), tmp_path, patch)
