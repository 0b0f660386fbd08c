"""The vision towers of Llava (arXiv:2304.08485, 2310.03744): CLIP (2103.00020), whose class token is left
out, or SigLIP (2303.15343), for images of one size; or that of Pixtral 12B (2410.07073), whose rows end with
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.patches import TiledPatches
from quire.images.sizes import OneSquare
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.siglip import CLIP, SIGLIP, clip_patches, encoder_layers, siglip_patches
from quire.models.tower import (
    clip_pixels,
    image_token,
    normalization,
    project,
    require_last_layer,
    require_squares,
    square_size,
    text_width,
    tower_fields,
    unquantized,
)
from quire.models.vision_pixtral import ROW_ENDS, TOKEN, pixtral
from quire.program import Builder, Names, Value

_WHOLE = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
_CLIP, _SIGLIP, _PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
_STRATEGIES = {_CLIP: "default", _SIGLIP: "full", _PIXTRAL: "full"}  # without the first token, or with all
_TOKEN = 32000


def llava_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of a Llava, with its projection to the embeddings of the text model."""
    whole, kind = Fields({**_WHOLE, **raw}), str(raw["vision_config"].get("model_type", _CLIP))
    strategy = whole.get("vision_feature_select_strategy")
    if kind not in _STRATEGIES or strategy != _STRATEGIES[kind]:
        problem = f"a tower {quoted(kind)} with vision_feature_select_strategy = {quoted(strategy)}"
        raise ConfigError(f"config.json: {problem} is not supported", "max_images=0 reads text alone")
    if kind == _PIXTRAL:
        return _pixtral(raw, whole, processor)
    cfg, b, w = tower_fields(raw, CLIP if kind == _CLIP else SIGLIP), Builder(), Names("model.vision_tower")
    patching, count = _patching(cfg, processor, kind == _CLIP), _layers(cfg, whole)
    embed = clip_patches if kind == _CLIP else siglip_patches
    x = encoder_layers(b, cfg, embed(b, cfg, w, patching.most[0]), w, count)
    later = [w / f"encoder.layers.{i}.*" for i in range(count, cfg.size("num_hidden_layers"))]
    ignored = (*later, w / "post_layernorm.*", w / "head.*")
    program = b.program(_projected(b, whole, x), ignored)
    return Vision(unquantized(program), patching, image_token(raw, _TOKEN))


def _pixtral(raw: Mapping[str, Any], whole: Fields, processor: Mapping[str, Any]) -> Vision:
    require_last_layer(whole)
    b = Builder()
    x, patching = pixtral(b, Names("model.vision_tower"), raw, processor, merge=1)
    program = unquantized(b.program(_projected(b, whole, x)))
    return Vision(program, patching, image_token(raw, TOKEN), row_ends=ROW_ENDS)


def _projected(b: Builder, whole: Fields, x: Value) -> Value:
    """Return patches as embeddings of the text model. A class token after them is left out."""
    w, width = Names("model.multi_modal_projector"), text_width(whole.values)
    return project(b, whole, b.sampled_rows(x), w, width, bias=whole.flag("multimodal_projector_bias"))


def _layers(cfg: Fields, whole: Fields) -> int:
    """Return after how many layers the text model gets what the tower has. Raises ConfigError for several."""
    stated, count = whole.get("vision_feature_layer"), cfg.size("num_hidden_layers")
    layer = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
    if type(layer) is not int or not -count - 1 <= layer <= count:
        problem = f"vision_feature_layer = {quoted(stated)} of {count} layers is not supported"
        raise ConfigError(f"config.json: {problem}")
    return layer % (count + 1)


def _patching(cfg: Fields, processor: Mapping[str, Any], classed: bool) -> TiledPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    patch, side = square_size(cfg, "patch_size"), square_size(cfg, "image_size")
    require_squares(side, patch, 1, cfg.size("num_channels"))
    shorter, square = {"shortest_edge": side}, {"height": side, "width": side}
    size, crop = processor.get("size", shorter if classed else square), processor.get("crop_size", square)
    cropped = Fields({"do_center_crop": classed, **processor}).flag("do_center_crop")
    middle = cropped and size in (shorter, side)
    if not (middle or size == square) or (cropped and crop not in (square, side)):
        problem = f"size = {quoted(size)} and crop_size = {quoted(crop)} are not supported"
        raise ConfigError(f"preprocessor_config.json: {problem}", f"the tower takes {side} x {side} pixels")
    if processor.get("do_pad"):
        raise ConfigError("preprocessor_config.json: do_pad = True is not supported")
    numbers, resample = clip_pixels(processor)
    numbers = numbers if classed else normalization(processor)
    return TiledPatches(patch, 1, OneSquare(side, middle), numbers, resample, classed)
