"""Images of Gemma 3 as transformers sees them, whose tokens see each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver
from oracle import torch, transformers
from pictures import END, IMAGE, START, picture, prompt
from safetensors.torch import save_file

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

    tokens = torch.tensor([ids])
    how = {"pixel_values": given, "token_type_ids": (tokens == IMAGE).int()}
    greedy = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **how).logits[0].log_softmax(dim=-1).numpy()
        answer = theirs.generate(tokens, **how, attention_mask=torch.ones_like(tokens), **greedy)

    program = fuse(model.program)
    specs = replace(program, ops=(*program.ops, *vision.program.ops)).weights()
    weights = load(plan(specs, under_own_names(specs, source.tensors())))
    size = {"num_blocks": [64] * len(program.cache_groups), "block_size": 16, "num_slots": 1}
    scores = []
    for chunks in ((len(ids),), (2, 18, 1, 1, 19), (4, 16, 4, 16, 3)):
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
