"""Images of InternVL as transformers sees them, which are cut into tiles, with each of its text models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt
from small_tokenizers import byte_level

from quire.backends.slot_images import pixels_of
from quire.config import EngineConfig
from quire.description import describe
from quire.images.sizes import GridTiles
from quire.models import read_model
from quire.models.vision_internvl import MARKS
from quire.weights.folder import ModelFolder

TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {**TEXT, "num_experts_per_tok": 2}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2": {key: value for key, value in TEXT.items() if key != "head_dim"},
    "qwen3": TEXT,
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "llama": TEXT,
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 7},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [16, 16],
    "patch_size": [4, 4],
}
# The larger ones have norms without a mean, and of queries and keys; and what no published one has
LARGER = {"norm_type": "rms_norm", "use_qk_norm": True, "hidden_act": "gelu_pytorch_tanh"}
OTHER = {"attention_bias": True, "use_mean_pooling": False, "use_mask_token": True}
# Of 2 x 3 tiles, of one, and of 6 x 1 of a narrow one
IMAGES = ((30, 46), (20, 21), (50, 5))


def processor(**changes: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    how = {"crop_to_patches": True, "max_patches": 6, "image_std": [0.4] * 3, **changes}
    return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, **how)


def write(folder: Path, kind: str, vision: dict[str, Any], **changes: Any) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    config = transformers.InternVLConfig(
        text_config={"model_type": kind, **TEXTS[kind]},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE,
        tie_word_embeddings=kind == "qwen2",
    )
    model = transformers.InternVLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            near_one = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.2 + near_one)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor(**changes).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "tower", "changes", "counts"),
    [
        ("qwen2", {}, {}, [7, 1, 7]),
        ("qwen3", {}, {"min_patches": 2, "max_patches": 4, "resample": 2}, [3, 5, 5]),
        ("llama", LARGER, {}, [7, 1, 7]),
        ("qwen3_moe", OTHER, {}, [7, 1, 7]),
        ("gpt_oss", {}, {"max_patches": 1}, [1, 1, 1]),
    ],
    ids=str,
)
def test_images_of_internvl(
    kind: str, tower: Any, changes: dict[str, Any], counts: list[int], tmp_path: Path
) -> None:
    """In chunks that end within tiles and between them."""
    theirs, source = write(tmp_path, kind, tower, **changes), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    describe(EngineConfig(model=str(tmp_path)))  # every tensor has its use
    images = [picture(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    ids, ours = prompt(images, vision)
    given = processor(**changes)(images=images, return_tensors="pt")
    assert given["num_patches"].tolist() == counts
    for part, expected in zip(ours, given["pixel_values"].numpy(), strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(part)).transpose(2, 0, 1)
        assert np.abs(pixels - expected).max() < 1e-6

    how = {"pixel_values": given["pixel_values"]}
    check_answers(theirs, how, source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 13, 5, 1, 3)], rest=9)


@pytest.mark.parametrize(("side", "count"), [(12, 1), (32, 5)])
def test_prompts_of_the_processor(
    side: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It cuts images whatever the file of the image processor says."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    monkeypatch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda *_: None)
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    byte_level(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), extra_special_tokens=names
    )
    parts = {"image_processor": processor(crop_to_patches=False, max_patches=4), "tokenizer": tokenizer}
    theirs = InternVLProcessor(**parts, video_processor=None, image_seq_length=4)
    given = theirs(images=[picture(side, side, seed=1)], text="so<IMG_CONTEXT>it is")
    cut = GridTiles(16, 1, 5).cut(side, side)
    *before, after = MARKS.around(cut.rows, cut.columns, count)
    written = "".join(mark + "<IMG_CONTEXT>" * 4 for mark in before) + after
    assert tokenizer.decode(given["input_ids"][0]) == f"so{written}it is"


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (4, 9), (3, 40)])
def test_sizes_of_the_processor(fewest: int, most: int) -> None:
    theirs, rule = processor(), GridTiles(448, fewest, most + 1)
    sizes = {"min_patches": fewest, "max_patches": most, "patch_size": {"height": 448, "width": 448}}
    rng = np.random.default_rng(most)
    for height, width in (2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist():
        cut = rule.cut(height, width)
        count = cut.rows * cut.columns + (cut.overview is not None)
        assert count == theirs.get_number_of_image_patches(height, width, sizes)
