"""Images of GLM-4.1V, 4.5V, 4.6V and GLM-OCR as transformers sees them."""

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

MARKS = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "image_size": 24,  # 6 x 6 learned positions
    "patch_size": 4,
    "out_hidden_size": 64,
}
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
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DENSE = {**TEXT, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}}
MOE = {
    **TEXT,
    "head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 3]},
}
OCR = {**TEXT, "head_dim": 24, "rope_parameters": {**ROPE, "mrope_section": [3, 4, 5]}}
# name of the classes -> text_config, and what differs in vision_config
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Glm4v": (DENSE, {}),
    "Glm46V": ({**DENSE, "model_type": "glm4v_text"}, {"attention_bias": True, "model_type": "glm4v_vision"}),
    "Glm4vMoe": (MOE, {"image_size": 8}),
    "GlmOcr": (OCR, {}),
}
# Larger and smaller than the learned positions, and one whose lower side has less than a token
IMAGES = ((37, 61), (90, 20), (6, 30))


def processor(**changes: Any) -> Any:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    size = {"shortest_edge": 2 * 64 * 4, "longest_edge": 2 * 64 * 40}
    own = {"patch_size": 4, "size": size, "image_mean": [0.5] * 3, "image_std": [0.4] * 3}
    return Glm4vImageProcessorPil(**own | changes)


def write(kind: str, folder: Path) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    text, vision = CONFIGS[kind]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config={**VISION, **vision}, **MARKS
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
        for name, bias in model.named_buffers():
            if "correction_bias" in name:
                bias.normal_(std=0.3)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_images_of_glm(kind: str, tmp_path: Path) -> None:
    """In chunks that end within images and between them."""
    theirs, source = write(kind, tmp_path), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    given = processor()(images=images, return_tensors="pt")
    ids, ours = prompt(images, vision)
    patches = np.concatenate([vision.patching.patches(pixels_of(own)) for own in ours])
    pixels = given["pixel_values"].numpy()
    assert np.abs(patches[:, : pixels.shape[1]] - pixels).max() < 1e-6

    how = {**given, "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int()}
    check_answers(theirs, how, source, model, ids, ours, [(2, 7, 1, 1, 19)], rest=33)


@pytest.mark.parametrize(("least", "most"), [(12544, 9633792), (2 * 784, 2 * 784 * 100)])
def test_sizes_of_the_processor(least: int, most: int) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    rule, compared = KeptShape(28, least // 2, most // 2, "once"), 0
    rng = np.random.default_rng(most)
    for height, width in (2 ** rng.uniform(0, 13, (5000, 2))).astype(int).tolist():
        try:
            expected = smart_resize(2, height, width, 2, 28, least, most)
        except ValueError:
            with pytest.raises(ValueError, match="too narrow"):
                rule.of(height, width)
            continue
        if 2 * expected[0] * expected[1] <= most:  # theirs may have more if they are narrow
            assert rule.of(height, width) == expected
            compared += 1
    assert compared > 3000
