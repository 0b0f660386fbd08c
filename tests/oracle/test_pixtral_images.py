"""Images of Mistral's models as transformers sees them, whose rows end with tokens of text."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver
from oracle import torch, transformers
from pictures import IMAGE, picture, prompt

from quire.backends.reference import ReferenceBackend
from quire.backends.slot_images import pixels_of
from quire.models import read_model
from quire.program.passes import fuse
from quire.weights.folder import ModelFolder
from quire.weights.load import load
from quire.weights.plan import plan
from quire.weights.renamed import under_own_names

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
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.Mistral3Config(
        text_config=TEXTS[kind],
        vision_config=VISION,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        multimodal_projector_bias=kind != "mistral",
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model.eval()


def processor() -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(
        size={"longest_edge": 60}, patch_size={"height": 8, "width": 8}, image_std=[0.4] * 3
    )


@pytest.mark.parametrize("kind", TEXTS)
def test_images_of_mistral(kind: str, tmp_path: Path) -> None:
    """Three, of which one is made smaller, in chunks that end within rows and between them."""
    theirs, source = write(kind, tmp_path), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(37, 30, seed=0), picture(20, 90, seed=1), picture(5, 6, seed=2)]
    ids, ours = prompt(images, vision)
    given = processor()(images=images, return_tensors="pt")
    for image, expected, size in zip(ours, given["pixel_values"].numpy(), given["image_sizes"], strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(image)).transpose(2, 0, 1)
        assert pixels.shape[1:] == tuple(size)
        assert np.abs(pixels - expected[:, : size[0], : size[1]]).max() < 1e-6

    tokens = torch.tensor([ids])
    greedy = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **given).logits[0].log_softmax(dim=-1).numpy()
        answer = theirs.generate(tokens, **given, attention_mask=torch.ones_like(tokens), **greedy)

    program = fuse(model.program)
    specs = replace(program, ops=(*program.ops, *vision.program.ops)).weights()
    weights = load(plan(specs, under_own_names(specs, source.tensors())))
    size = {"num_blocks": [64] * len(program.cache_groups), "block_size": 16, "num_slots": 1}
    scores = []
    for chunks in ((len(ids),), (2, 7, 1, 1, 19), (4, 6, 5, 1, 3)):
        run = Driver(program, ReferenceBackend(program, weights, **size, vision=vision))
        sequence, counts = run.admit(0, ids, images=tuple(ours)), chain(chunks, repeat(1))
        while len(sequence.tokens) < len(ids) + 16:
            run.step((sequence, min(next(counts), len(sequence.tokens) - sequence.computed)))
        assert sequence.tokens == answer[0].tolist()
        scores.append(sequence.scores())
    assert scores[0] == scores[1] == scores[2], "chunks change bits"
    for position in range(1, len(ids)):
        apart = [one.logprob - expected[position - 1][one.token_id] for one in scores[0][position]]
        assert np.abs(apart).max() < 1e-4, position
