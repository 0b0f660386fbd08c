"""Images of Gemma 4 as transformers sees them: towers of three kinds, and text models that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import END, IMAGE, START, check_answers, picture, prompt

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
    "global_head_dim": 32,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
# For each of the published kinds of models: what differs in text_config and vision_config
LAYERS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260, "pad_token_id": 5}
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
BOTH_WAYS = {"use_bidirectional_attention": "vision"}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 300,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": ({**LAYERS, **SHARED}, {"use_clipped_linears": True}),
    "large": (BOTH_WAYS, {"standardize": True, "num_key_value_heads": 1, "head_dim": 24}),
    "experts": ({**BOTH_WAYS, **EXPERTS}, {"standardize": True, "rms_norm_eps": 1e-3}),
    "all": (
        {**BOTH_WAYS, **LAYERS, **SHARED},
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}},
    ),
}
MARKS = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END}
OTHERS = {"video_token_id": 254, "audio_token_id": 255}


def write(folder: Path, kind: str) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(1)
    text, vision = KINDS[kind]
    parts = {"text_config": {**TEXT, **text}, "vision_config": {**VISION, **vision}, "audio_config": None}
    model = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(**parts, **MARKS, **OTHERS))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + name.endswith("norm.weight"))
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # scores have no other scale
                weight.mul_(0.4)
        for name, bound in model.named_buffers():
            if name.endswith(("_min", "_max")):
                bound.copy_((-1 if name.endswith("min") else 1) * (0.5 + torch.rand(())))
            if "std_" in name or "layer_scalar" in name:
                bound.uniform_(0.5, 1.5)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model.eval()


def processor() -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_gemma_4(kind: str, tmp_path: Path) -> None:
    """Three of them, one as narrow as can be, in chunks that divide none whose tokens see each other."""
    theirs, source = write(tmp_path, kind), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(37, 61, seed=0), picture(300, 50, seed=1), picture(3, 500, seed=2)]
    ids, ours = prompt(images, vision)
    given = processor()(images=images, return_tensors="pt")
    assert [image.num_tokens for image in ours] == given["num_soft_tokens_per_image"].tolist()
    for image, pixels, places in zip(ours, given["pixel_values"], given["image_position_ids"], strict=True):
        patches, count = vision.patching.patches(pixels_of(image)), 9 * image.num_tokens
        own = {(x, y): patch for *patch, x, y in patches.tolist()}
        for patch, place in zip(pixels[:count].tolist(), places[:count].tolist(), strict=True):
            assert np.abs((np.array(own[tuple(place)][:48]) + 1) / 2 - patch).max() < 1e-6

    how = {"pixel_values": given["pixel_values"], "image_position_ids": given["image_position_ids"]}
    how["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE).int()
    first, second = ours[0].num_tokens, ours[1].num_tokens
    chunkings = [(2, first + 2, 3, 1, second + 4), (4, first, 4, second, 3)]
    check_answers(theirs, how, source, model, ids, ours, chunkings, rest=99)
