"""Images of Aya Vision and Command A Vision as transformers sees them, which are cut into tiles."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import torch, transformers
from pictures import IMAGE, check_answers, picture, prompt

from quire.backends.slot_images import pixels_of
from quire.config import EngineConfig
from quire.description import describe
from quire.images.sizes import GridTiles
from quire.models import read_model
from quire.models.vision_cohere import AYA_MARKS, COHERE2_MARKS
from quire.weights.folder import ModelFolder

TEXT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "logit_scale": 1.0,  # their classes of whole models do not scale logits, those of text models do
}
TEXTS: dict[str, dict[str, Any]] = {
    "cohere2": {**TEXT, "sliding_window": 7},
    "cohere": {**TEXT, "use_qk_norm": True},
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 18,  # of which two pixels are in no patch
    "patch_size": 4,
}
# Of 2 x 3 tiles, of one, and of 6 x 1 of a narrow one
IMAGES = ((30, 46), (18, 17), (50, 5))
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], list[int]]] = [
    ("AyaVision", "cohere2", {}, {"crop_to_patches": False}, [7, 1, 7]),
    ("AyaVision", "cohere", {"alignment_intermediate_size": 40}, {"max_patches": 1}, [1, 1, 1]),
    ("Cohere2Vision", "cohere2", {}, {}, [7, 1, 4]),
    ("Cohere2Vision", "cohere2", {}, {"crop_to_patches": False}, [1, 1, 1]),
]


def fitting_canvas() -> Any:
    """Cohere 2's choice of a grid, taken out of its file: to import that, torchvision is needed."""
    path = Path(transformers.__file__).parent / "models/cohere2_vision/image_processing_cohere2_vision.py"
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    scope = {"np": np, "lru_cache": lru_cache}
    exec(compile(ast.Module(nodes, []), path, "exec"), scope)
    return scope["get_optimal_tiled_canvas"]


def processor(kind: str, **changes: Any) -> Any:
    """That of Aya Vision, which differs from the other in the choice of a grid, and in cutting by default."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    how = {"size": {"height": 18, "width": 18}, "max_patches": 6, "image_mean": [0.4] * 3, **changes}
    return GotOcr2ImageProcessorPil(**({} if kind == "AyaVision" else {"crop_to_patches": True}) | how)


def write(folder: Path, kind: str, text: str, whole: dict[str, Any], **changes: Any) -> Any:
    """Save a tiny model with random weights, and its processor. Return transformers' model."""
    torch.manual_seed(0)
    parts = {"text_config": {"model_type": text, **TEXTS[text]}, "vision_config": VISION}
    own = {} if kind == "AyaVision" else {"alignment_intermediate_size": 40}
    config = getattr(transformers, f"{kind}Config")(**parts, **own, **whole)
    config.image_token_id = IMAGE
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name and name.endswith("weight")))
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor(kind, **changes).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("kind", "text", "whole", "changes", "counts"), CASES, ids=str)
def test_images_of_cohere(
    kind: str,
    text: str,
    whole: dict[str, Any],
    changes: dict[str, Any],
    counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In chunks that end within tiles and between them. Aya Vision cuts whatever the file says."""
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got

    if kind == "Cohere2Vision":
        monkeypatch.setattr(got, "get_optimal_tiled_canvas", fitting_canvas())
    theirs, source = write(tmp_path, kind, text, whole, **changes), ModelFolder.at(tmp_path)
    model = read_model(source.config(), source.image_processor())
    vision = model.vision
    assert vision is not None
    describe(EngineConfig(model=str(tmp_path)))  # every tensor has its use
    images = [picture(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    ids, ours = prompt(images, vision)
    always = {"crop_to_patches": True} if kind == "AyaVision" else {}
    given = processor(kind, **changes | always)(images=images, return_tensors="pt")
    assert given["num_patches"].tolist() == counts
    for part, expected in zip(ours, given["pixel_values"].numpy(), strict=True):
        pixels = vision.patching.normalization.apply(pixels_of(part)).transpose(2, 0, 1)
        assert np.abs(pixels - expected).max() < 1e-6

    how = {"pixel_values": given["pixel_values"]}
    check_answers(theirs, how, source, model, ids, ours, [(2, 7, 1, 1, 19), (4, 13, 5, 1, 3)], rest=9)


@pytest.mark.parametrize("most", [1, 4, 12, 40])
def test_grids_of_cohere_2(most: int) -> None:
    canvas, rule = fitting_canvas(), GridTiles(512, 1, most + 1, fitted=True)
    rng = np.random.default_rng(most)
    for height, width in (2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist():
        cut = rule.cut(height, width)
        assert (cut.columns, cut.rows) == canvas((height, width), (512, 512), 1, most)
    for height, width in ((512, 512), (1024, 512), (1536, 1024), (513, 1), (4096, 4096)):
        cut = rule.cut(height, width)
        assert (cut.columns, cut.rows) == canvas((height, width), (512, 512), 1, most)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", ["AyaVision", "Cohere2Vision"])
def test_prompts_of_the_processor(kind: str, grid: tuple[int, int]) -> None:
    from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
    from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

    count = grid[0] * grid[1] + (grid != (1, 1))
    begin, patch, end, line = (
        f"<|{name}|>" for name in ("START_OF_IMG", "IMG_PATCH", "END_OF_IMG", "IMG_LINE_BREAK")
    )
    if kind == "AyaVision":
        own = {"start_of_img_token": begin, "end_of_img_token": end, "img_patch_token": patch}
        own |= {"tile_token": "TILE", "tile_global_token": "TILE_GLOBAL", "img_size": 4, "patch_size": 2}
        theirs, marks = AyaVisionProcessor.__new__(AyaVisionProcessor), AYA_MARKS
    else:
        own = {"boi_token": begin, "eoi_token": end, "image_token": patch, "img_line_break_token": line}
        own |= {"patch_size": 2}
        theirs, marks = Cohere2VisionProcessor.__new__(Cohere2VisionProcessor), COHERE2_MARKS
    for name, value in own.items():
        setattr(theirs, name, value)
    *before, after = marks.around(*grid, count)
    written = "".join(mark + patch * 4 for mark in before) + after
    assert written == theirs.replace_image_token({"num_patches": [count]}, 0)
