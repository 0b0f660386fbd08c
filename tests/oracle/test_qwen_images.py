"""Images as transformers sees them: what processors give, and the logits of what follows."""

from __future__ import annotations

from dataclasses import replace
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

MARKS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {**ROPE, "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.5},
}
_WITHOUT = {key: value for key, value in TEXT.items() if key != "head_dim"}
QWEN2 = {**_WITHOUT, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 5]}}
WINDOWS = {"hidden_act": "silu", "window_size": 23, "fullatt_block_indexes": [1]}  # of 2 x 2 tokens
# name of the classes -> text_config, and what differs in vision_config
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (QWEN2, {"embed_dim": 32, "hidden_size": 64, "hidden_act": "quick_gelu", "mlp_ratio": 2}),
    "Qwen2_5_VL": (QWEN2, WINDOWS),
    "Qwen3VL": ({**TEXT, "rope_parameters": ROPE}, {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3VLMoe": ({**TEXT, **MOE, "rope_parameters": ROPE}, {"deepstack_visual_indexes": [1]}),
    "Qwen3_5": ({**TEXT, **NET}, {}),
    "Qwen3_5Moe": ({**TEXT, **NET, **MOE, "shared_expert_intermediate_size": 24}, {}),
}


def write(kind: str, folder: Path) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    text, vision = CONFIGS[kind]
    parts = {"text_config": text, "vision_config": {**VISION, **vision}}
    config = getattr(transformers, f"{kind}Config")(**parts, **MARKS)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    processor().save_pretrained(folder)
    return model.eval()


def processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64 * 4, "longest_edge": 64 * 40}
    own = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    return Qwen2VLImageProcessorPil(**own, image_mean=[0.5] * 3, image_std=[0.4] * 3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_images(kind: str, tmp_path: Path) -> None:
    """Two of them, resized by another library than theirs, in chunks."""
    theirs, source = write(kind, tmp_path), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    images = [picture(37, 61, seed=0), picture(90, 20, seed=1)]
    given = processor()(images=images, return_tensors="pt")
    ids, ours = prompt(images, vision)
    patches = np.concatenate([vision.patching.patches(pixels_of(own)) for own in ours])
    pixels = given["pixel_values"].numpy()
    assert np.abs(patches[:, : pixels.shape[1]] - pixels).max() < 1e-6

    tokens = torch.tensor([ids])
    how = {**given, "mm_token_type_ids": (tokens == IMAGE).int()}
    greedy = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **how).logits[0].log_softmax(dim=-1).numpy()
        answer = theirs.generate(tokens, **how, attention_mask=torch.ones_like(tokens), **greedy)

    program = fuse(model.program)
    weights = load(
        plan(replace(program, ops=(*program.ops, *vision.program.ops)).weights(), source.tensors())
    )
    size = {"num_blocks": [64] * len(program.cache_groups), "block_size": 16, "num_slots": 1}
    run = Driver(program, ReferenceBackend(program, weights, **size, vision=vision))
    sequence = run.admit(0, ids, images=tuple(ours))
    while len(sequence.tokens) < len(ids) + 16:
        run.step((sequence, min(33, len(sequence.tokens) - sequence.computed)))
    found = sequence.scores()
    for position in range(1, len(ids)):
        apart = [one.logprob - expected[position - 1][one.token_id] for one in found[position]]
        assert np.abs(apart).max() < 1e-4 * np.abs(expected).max(), position
    assert sequence.tokens == answer[0].tolist()
