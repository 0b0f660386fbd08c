"""The vision tower of PaddleOCR-VL (arXiv:2510.14528): SigLIP for images of any shape, over which its learned
positions are stretched, and whose patches rotate by row and column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.learned import Learned
from quire.images.patches import MergedPatches
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.defaults_later import PADDLEOCR_VL
from quire.models.siglip import SIGLIP, siglip_rotated
from quire.models.tower import (
    clip_pixels,
    image_sizes,
    image_token,
    require_same,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, ops

_TOWER = {
    **SIGLIP,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_TOKEN, _SIZES = 100295, (384 * 384, 1536 * 1536)
_THETA, _PAIRS = 10_000.0, 4  # numbers of a head are pairs of two axes
_EPS = 1e-5  # of the projection
_UNUSED = ("head.*", "embeddings.packing_position_embedding.*")


def paddleocr_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of PaddleOCR-VL, with its projection to the embeddings of the text model."""
    cfg, b, w = tower_fields(raw, _TOWER), Builder(), Names("model.visual.vision_model")
    patch, merge = cfg.size("patch_size"), cfg.size("spatial_merge_size")
    width, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    learned = Learned(cfg.size("image_size") // patch)
    if width % (_PAIRS * heads) or cfg.size("num_channels") != 3 or not learned.side:
        problem = f"{width} numbers in {heads} heads, {learned.side} positions of a side"
        raise ConfigError(f"config.json: vision_config: {problem} are not supported")
    require_same(processor, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 1})
    x = siglip_rotated(b, cfg, w, learned.side**2, learned.number, theta_of(cfg, _THETA))
    wide, p = width * merge**2, Names("model.projector")
    x = b.record(ops.JoinRows(b.value((wide,), "L"), b.layer_norm(x, p / "pre_norm", _EPS))).out
    x = b.activation(b.linear(x, p / "linear_1", wide, bias=True), "gelu")
    text = raw.get("text_config", raw)
    out = b.linear(x, p / "linear_2", Fields({**PADDLEOCR_VL, **text}).size("hidden_size"), bias=True)
    patching = MergedPatches(
        patch, merge, 1, learned, *image_sizes(processor, _SIZES), *clip_pixels(processor), enlarged="twice"
    )
    program = unquantized(b.program(out, tuple(w / name for name in _UNUSED)))
    return Vision(program, patching, image_token(raw, _TOKEN))
