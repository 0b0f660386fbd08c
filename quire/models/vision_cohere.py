"""The vision towers of Aya Vision (arXiv:2505.08751) and Command A Vision: SigLIP (2303.15343), whose patches
become tokens by squares and a gated MLP. Images are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.marks import Marks
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.siglip import SIGLIP, encoder_layers, siglip_layers, siglip_patches
from quire.models.tower import (
    grid_tiles,
    image_token,
    require_last_layer,
    text_width,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, ops

_BEGIN, _PATCH, _END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"
AYA_MARKS = Marks(
    alone=f"{_BEGIN}TILE_GLOBAL", begin=_BEGIN, tile="TILE_{number}", overview="TILE_GLOBAL", end=_END
)
COHERE2_MARKS = Marks(alone=_BEGIN, begin=_BEGIN, tile="", overview="", after="<|IMG_LINE_BREAK|>", end=_END)
_AYA = {
    "downsample_factor": 2,
    "adapter_layer_norm_eps": 1e-6,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_COHERE2 = {"downsample_factor": 2, "alignment_intermediate_size": 36864}
_TOKEN = 255036
_TOWER, _PROJECTOR = Names("model.vision_tower"), Names("model.multi_modal_projector")


def aya_vision_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Aya Vision, with its projection to the embeddings of the text model."""
    cfg, b = tower_fields(raw, SIGLIP), Builder()
    whole = Fields({**_AYA, "alignment_intermediate_size": text_width(raw), **raw})
    require_last_layer(whole)
    if (strategy := whole.get("vision_feature_select_strategy")) != "full":
        problem = f"vision_feature_select_strategy = {quoted(strategy)} is not supported"
        raise ConfigError(f"config.json: {problem}")
    patching = grid_tiles(cfg, processor, whole.size("downsample_factor"))  # cut, whatever a file says
    x = siglip_patches(b, cfg, _TOWER, patching.most[0])
    x = encoder_layers(b, cfg, x, _TOWER, cfg.size("num_hidden_layers"))
    x = b.layer_norm(_joined(b, whole, x), _PROJECTOR / "layernorm", whole.positive("adapter_layer_norm_eps"))
    program = b.program(_projected(b, whole, x), (_TOWER / "post_layernorm.*", _TOWER / "head.*"))
    written = "<image>", _PATCH
    return Vision(unquantized(program), patching, image_token(raw, _TOKEN), written=written, marks=AYA_MARKS)


def cohere2_vision_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Command A Vision, with its projection to the embeddings of the text model."""
    cfg, whole, b = tower_fields(raw, SIGLIP), Fields({**_COHERE2, **raw}), Builder()
    if not Fields({"crop_to_patches": True, **processor}).flag("crop_to_patches"):
        processor = {**processor, "max_patches": 1}
    patching = grid_tiles(cfg, processor, whole.size("downsample_factor"), fitted=True)
    x = siglip_layers(b, cfg, siglip_patches(b, cfg, _TOWER, patching.most[0]), _TOWER)
    program = b.program(_projected(b, whole, _joined(b, whole, x)), (_TOWER / "head.*",))
    return Vision(unquantized(program), patching, image_token(raw, _TOKEN), marks=COHERE2_MARKS)


def _joined(b: Builder, whole: Fields, x: Value) -> Value:
    """Return squares of patches, one in each row."""
    return b.record(ops.JoinRows(b.value((whole.size("downsample_factor") ** 2 * x.width,), "L"), x)).out


def _projected(b: Builder, whole: Fields, x: Value) -> Value:
    """Return squares of patches as embeddings of the text model."""
    inner = whole.size("alignment_intermediate_size")
    if inner % 2:
        problem = f"alignment_intermediate_size = {inner} is not of two equal halves"
        raise ConfigError(f"config.json: {problem}")
    h = b.linear(x, _PROJECTOR / "linear_1", inner, bias=True)
    up, gate = (b.slice(h, first, inner // 2) for first in (0, inner // 2))
    h = b.gated_activation(gate, up, "silu")
    return b.linear(h, _PROJECTOR / "linear_2", text_width(whole.values), bias=True)
